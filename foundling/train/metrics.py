"""What a run says about itself: metrics.jsonl (every step, once), TensorBoard, W&B, the screen."""

import contextlib
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from foundling.config.model import ModelConfig
from foundling.config.run import LogConfig
from foundling.plan.params import flops_per_token
from foundling.runtime.console import console, say, warn
from foundling.runtime.run_dir import LineFile, RunDir
from foundling.train.dataloader import DataLoader
from foundling.train.run_metadata import PROBE_STEPS, PlanComparison, overruns, planned_and_measured
from foundling.train.state import TrainState
from foundling.train.step import StepResult
from foundling.train.token_ledger import sources_read

_flops_per_token = lru_cache(maxsize=64)(flops_per_token)


class Sink(Protocol):
    """Somewhere numbers go besides metrics.jsonl."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def rewind(self, step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoardSink:
    """Event files; after a resume TensorBoard drops what came after the checkpoint."""

    def __init__(self, run: RunDir, resumed_at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make, self._folder = SummaryWriter, str(run.tensorboard)
        self._writer = SummaryWriter(self._folder, purge_step=resumed_at + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._writer = self._make(self._folder, purge_step=step + 1)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """One W&B run for the whole life of a run directory, however often it is resumed."""

    def __init__(self, run: RunDir, log: LogConfig) -> None:
        import wandb

        # Chosen and stored before W&B gets it: a kill in between must not leave two runs.
        identity = run.read_info().get("wandb_id") or uuid.uuid4().hex[:12]
        run.update_info(wandb_id=identity)
        self._run = wandb.init(
            project=log.project,
            id=identity,
            name=run.path.name,
            dir=str(run.path),
            mode=log.wandb,
            resume="allow",
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def rewind(self, step: int) -> None:
        """W&B takes no step twice: it shows the new course from where the old one ended."""

    def close(self) -> None:
        self._run.finish()


@dataclass(frozen=True)
class FlopRates:
    """The model's FLOP/s as shares of the devices' peaks."""

    model: ModelConfig
    peaks: Mapping[str, float]
    """FLOP/s of all ranks together, by the share that is taken of them: `matmul_share` of a
    product's as measured, `mfu` of the data sheet's, where there is one."""

    def shares(self, positions: int, row_len: float, seconds: float) -> dict[str, float]:
        """What so many positions in rows of this length make of each peak."""
        flops = positions * _flops_per_token(self.model, round(row_len)) / seconds
        return {name: float(f"{flops / peak:.4g}") for name, peak in self.peaks.items()}


class Metrics:
    """Writes each step's lines, shows it on the logging clock, and holds the run to its plan."""

    def __init__(
        self,
        run: RunDir,
        log: LogConfig,
        rates: FlopRates,
        plan: PlanComparison,
        *,
        total_steps: int,
        resumed_at: int,
        main: bool = True,
    ) -> None:
        """Only the main rank writes; the others would say the same."""
        self._run, self._rates, self._plan = run, rates, plan
        self._every, self._total = log.every, total_steps
        self._step_seconds: list[float] = []
        self.seconds_outside_steps: dict[str, float] = {}
        """Seconds since the last step's line that no step took, by what they went to (save_s)."""
        self._sinks: list[Sink] = []
        self._file: LineFile | None = None
        """metrics.jsonl; none where another rank writes."""
        self._screen: ProgressDisplay | None = None
        if not main:
            return
        if log.wandb != "off":
            self._sinks.append(WandbSink(run, log))
        if log.tensorboard:
            self._sinks.append(TensorBoardSink(run, resumed_at))
        self._file = LineFile(run.metrics_path)
        self._screen = ProgressDisplay(total_steps, resumed_at)

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Count the time inside as seconds outside the steps, in the next step's line."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add_seconds(what, time.perf_counter() - began)

    def add_seconds(self, what: str, seconds: float) -> None:
        """The same for seconds that were measured elsewhere."""
        self.seconds_outside_steps[what] = self.seconds_outside_steps.get(what, 0.0) + seconds

    def write(self, result: StepResult, state: TrainState, loader: DataLoader) -> None:
        """A step's line in metrics.jsonl."""
        step_s = time.perf_counter() - loader.requested_at
        self._step_seconds.append(step_s)
        outside, self.seconds_outside_steps = self.seconds_outside_steps, {}
        if self._file is None or self._screen is None:
            return
        step, order, memory = result.step, loader.order, state.memory()
        total = result.counts.total
        rate = total.tokens / step_s
        line: dict[str, Any] = {
            "step": step,
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "update_ratio": result.update_ratios.get("all"),
            "seq_len": round(result.row_len, 1),
            "positions": total.positions,
            "tokens": total.tokens,
            "targets": total.targets,
            "total_tokens": result.total_tokens,
            "non_padding": total.tokens / max(total.positions, 1),
            "tokens_per_s": round(rate, 1),
            **self._rates.shares(total.positions, result.row_len, step_s),
            "step_s": round(step_s, 5),
            "data_wait_s": round(loader.waited_s, 5),
            **{what: round(seconds, 5) for what, seconds in outside.items()},
            **memory,
            "sources": sources_read(
                result.counts, order.epochs(order.sample_of(loader.position(step)))
            ),
        }
        if skipped := loader.skips.units_ahead_of(order, step - 1):
            line["skipped"] = dict(skipped)  # units that were left out right before it
        if result.update_ratios:
            line["update_ratios"] = result.update_ratios
            line["group_grad_norms"] = result.group_grad_norms
        self._file.append(line)
        numbers = {k: float(v) for k, v in line.items() if isinstance(v, (int, float))}
        self._to_sinks(lambda sink: sink.write(step, numbers))
        self._screen.show(line, due=step % self._every == 0 or step == self._total)
        if step == PROBE_STEPS:
            predicted = self._plan.predicted(self.median_step_s(skip=PROBE_STEPS // 3))
            self.compare_with_plan(predicted, step, memory["memory_peak"])

    def scores(self, step: int, values: Mapping[str, float]) -> None:
        """Evaluation results, on the same axes."""
        named = {f"eval/{name}": value for name, value in values.items()}
        self._to_sinks(lambda sink: sink.write(step, named))

    def rewind(self, step: int) -> None:
        """The run went back to `step`, and metrics.jsonl was cut."""
        if self._file is not None:
            self._file.resume_after_cut()
        if self._screen is not None:
            self._screen.rewind(step)
        self._to_sinks(lambda sink: sink.rewind(step))

    def sync(self) -> bool:
        """Bring the run's lines to disk: a checkpoint must never be newer than they are."""
        return (self._file is None or self._file.sync()) and self._run.sync() is None

    def compare_with_plan(self, predicted: Mapping[str, float], step: int, peak: float) -> None:
        """Print the planned and the measured step time and memory; warn where more was measured."""
        taken = min(step, PROBE_STEPS)
        found = {"step_s": self.median_step_s(skip=taken // 3), "memory_peak": peak}
        for line in planned_and_measured(predicted, found):
            say(f"  after {step} steps: {line}")
        for sentence in overruns(predicted, found):
            warn(sentence)

    def _to_sinks(self, send: Callable[[Sink], None]) -> None:
        """Send to every sink; one that fails gets no more: metrics.jsonl has the same numbers."""
        for sink in list(self._sinks):
            try:
                send(sink)
            except Exception as error:
                warn(f"{type(sink).__name__} failed and gets no more numbers: {error}")
                self._sinks.remove(sink)

    @property
    def has_steps(self) -> bool:
        """Whether this process has taken any; one that only scores the last checkpoint has not."""
        return bool(self._step_seconds)

    def median_step_s(self, skip: int = 0) -> float:
        """Median seconds of this process's steps so far, without its first few."""
        return statistics.median(self._step_seconds[skip:] or self._step_seconds)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        if self._screen is not None:
            self._screen.close()
        if self._file is not None:
            self._file.close()
        self._to_sinks(lambda sink: sink.close())


class ProgressDisplay:
    """A progress bar with the time left on a terminal, a plain line on the clock elsewhere."""

    def __init__(self, total_steps: int, done: int) -> None:
        self._total, self._started, self._done = total_steps, time.monotonic(), done
        self._bar = None
        if console().is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
                console=console(),
            )
            self._task = self._bar.add_task("", total=total_steps, completed=done)
            self._bar.start()

    def show(self, line: Mapping[str, Any], *, due: bool) -> None:
        text = (
            f"loss {line['loss']:.4f}  lr {line['lr']:.2e}  norm {line['grad_norm']:.2f}"
            f"  {line['tokens_per_s']:,.0f} tok/s"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=line["step"], description=text)
        elif due:
            taken = line["step"] - self._done
            left = (time.monotonic() - self._started) / taken * (self._total - line["step"])
            say(f"step {line['step']}/{self._total}  {text}  {left:.0f}s left")

    def rewind(self, step: int) -> None:
        """The run went back, perhaps to before this process began: the time left is estimated from
        the steps taken from here on."""
        self._started, self._done = time.monotonic(), step

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
