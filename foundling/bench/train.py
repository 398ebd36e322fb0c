"""`foundling bench train`: tokens a second through the product's own path, believed only with a
loss check.

Order of a run: the first step at the timed shape on text (it is the time to first step, and
its gradients are compared), the other steps of the check, the timed ones on random tokens, and when
that model is gone the plain reference.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from foundling.bench.batch_size import (
    alone,
    cap_memory,
    fastest,
    lift_cap,
    refuse_unwritable,
    try_sizes,
)
from foundling.bench.bench_rows import text_rows
from foundling.bench.loss_check import (
    Check,
    Course,
    Portion,
    course,
    gaps,
    kept_reference,
    read_reference,
    refuse_other_model,
)
from foundling.config.errors import RunError
from foundling.config.run import RunConfig
from foundling.plan.horizon import batch_tokens
from foundling.plan.params import count_params, flops_per_token
from foundling.profiling.step_runner import (
    WARM_UP,
    BenchRows,
    StepRunner,
    Tell,
    Timed,
    random_rows,
    tell_chosen,
)
from foundling.runtime.console import size, table
from foundling.runtime.device import (
    DeviceChoice,
    device_name,
    free_cached_memory,
    prepare_device,
    translate_out_of_memory,
)
from foundling.runtime.files import cache_folder
from foundling.runtime.progress import process_age
from foundling.runtime.versions import commit
from foundling.train.autotune.harness import matmul_peak, sheet_peak
from foundling.train.oom import refuse_on_oom, snapshot_on_oom
from foundling.train.step import manual_gc


@dataclass(frozen=True, kw_only=True)
class TrainTiming:
    """What one trainer's steps took."""

    who: str
    how: str
    """What exactly ran."""
    rows: int
    micro_steps: int
    step_s: float
    tokens_per_s: float
    mfu: float | None
    """None where the device has no data sheet."""
    matmul_share: float
    allocated: int
    reserved: int
    first_step_s: float
    """From the start of the process."""
    loss: float
    """Of the last timed step, on random tokens."""
    tried: dict[int, float | None]
    """Tokens a second by batch size, where the best was looked for."""


@dataclass(frozen=True, kw_only=True)
class TrainBench:
    """Everything that one `bench train` found."""

    device: str
    torch: str
    seq_len: int
    data: str
    steps: int
    flops_per_token: int
    params: int
    sheet_flops: float | None
    sheet: str
    matmul_flops: float
    """The best square product measured here."""
    results: tuple[TrainTiming, ...]
    check: Check | None

    @property
    def ours(self) -> TrainTiming:
        """The first is foundling."""
        return self.results[0]

    @property
    def mfu_definition(self) -> str:
        """In words and numbers."""
        over = f"{self.matmul_flops / 1e12:,.2f} TFLOP/s (the best square product measured here)"
        sheet = ""
        if self.sheet_flops:
            sheet = f"MFU: the same over {self.sheet_flops / 1e12:,.1f} TFLOP/s ({self.sheet}); "
        return (
            f"of matmul: (6 N + 12 L D T) x tokens/s over {over}; {sheet}N {self.params:,},"
            f" {self.flops_per_token:,} FLOP a token at T {self.seq_len}, causality and documents"
            " not counted"
        )

    def figure(self) -> dict[str, Any]:
        """What is kept of it, to be held to later."""
        ours, check = self.ours, self.check
        names = ("tokens_per_s", "matmul_share", "rows", "step_s", "allocated", "reserved")
        return {
            **{name: getattr(ours, name) for name in (*names, "first_step_s")},
            **({} if ours.mfu is None else {"mfu": ours.mfu}),
            "how": ours.how,
            "checked_steps": len(check.ours.losses) if check else 0,
            "checked_rows": str(check.rows[1]) if check else "",
            "loss_off": check.loss_off if check else None,
            "torch": self.torch,
            "commit": commit(),
        }

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        check = None if self.check is None else self.check.to_json()
        tree = asdict(replace(self, check=None))
        if not self.sheet_flops:
            del tree["sheet_flops"], tree["sheet"]
            for one in tree["results"]:
                del one["mfu"]
        return {**tree, "check": check, "mfu_definition": self.mfu_definition}


class ThroughputMeter:
    """What tokens a second amount to on a device."""

    def __init__(self, config: RunConfig, choice: DeviceChoice, matmul: float) -> None:
        """`matmul`: the best rate of a square product measured here."""
        self.model, self.seq_len = config.model, config.train.seq_len
        self.per_token = flops_per_token(config.model, config.train.seq_len)
        sheet = sheet_peak(choice)
        self.sheet: float | None = sheet[0] if sheet else None
        self.source = sheet[1] if sheet else ""
        self.matmul = matmul

    def result(
        self, who: str, how: str, timed: Timed, first_s: float, tried: dict[int, float | None]
    ) -> TrainTiming:
        """A line of the table."""
        flops = timed.tokens_per_s * self.per_token
        return TrainTiming(
            who=who,
            how=how,
            rows=timed.rows,
            micro_steps=timed.micro_steps,
            step_s=timed.seconds,
            tokens_per_s=timed.tokens_per_s,
            mfu=flops / self.sheet if self.sheet else None,
            matmul_share=flops / self.matmul,
            allocated=timed.allocated,
            reserved=timed.reserved,
            first_step_s=first_s,
            loss=timed.losses[-1],
            tried=tried,
        )


def describe_train(bench: TrainBench) -> list[str]:
    """The table of figures, and the conditions they were measured under."""
    mfu = ["MFU"] if bench.sheet_flops else []
    head = ["", "rows", "tokens/s", *mfu, "of matmul", "step s", "allocated", "reserved"]
    rows = [[*head, "first step s"]]
    for one in bench.results:
        micro = f"{one.rows} x {one.micro_steps}" if one.micro_steps > 1 else str(one.rows)
        shares = [*([] if one.mfu is None else [one.mfu]), one.matmul_share]
        numbers = [micro, f"{one.tokens_per_s:,.0f}", *(f"{s:.1%}" for s in shares)]
        numbers.append(f"{one.step_s:.4f}")
        memory = [size(one.allocated), size(one.reserved), f"{one.first_step_s:.1f}"]
        rows.append([one.who, *numbers, *memory])
    lines = [
        f"{bench.device}, torch {bench.torch}; rows of {bench.seq_len}, {bench.data}; median of"
        f" {bench.steps} steps after {WARM_UP}",
        *table(rows),
    ]
    lines += [f"{one.who}: {one.how}" for one in bench.results]
    lines += ["first step: from the start of the process"]
    lines.append(bench.mfu_definition)
    return lines + (bench.check.lines() if bench.check else ["no loss check: believe no speed"])


COMPILED = {
    "off": "eager",
    "blocks": "blocks compiled",
    "model": "compiled whole",
    "graphs": "blocks compiled, launched as CUDA graphs (allocated: all that is reserved)",
}


def how_it_ran(config: RunConfig, choice: DeviceChoice, chosen: Sequence[str] = ()) -> str:
    """The settings that a speed hangs on, of a config with everything chosen; `chosen` says why."""
    train = config.train
    compiled = COMPILED[str(train.compile)]
    if any(line.startswith("compile ") and "not measured" in line for line in chosen):
        compiled += " (compile auto was not measured: a long run on a CPU may take blocks)"
    said = [
        "fp32" if choice.name == "fp32" else f"fp32 weights, {choice.name} products",
        compiled,
        f"{train.kernels.loss} loss",
        *_attention(config),
        *(["feed-forward fused"] if train.kernels.mlp == "fused" else []),
        *([f"float8 {train.float8}"] if train.float8 != "none" else []),
        *(["logits too"] if train.head_float8 else []),
        f"recompute {config.parallel.recompute}",
        config.optim.name,
    ]
    return ", ".join(said)


def _attention(config: RunConfig) -> list[str]:
    """The kernels that some layer uses: plain causal, and of windows or documents."""
    train, model, mask = config.train, config.model, config.data.document_mask
    windows = {model.window_of(layer) for layer in range(model.layers)}
    said = [f"attention {train.kernels.attention}"] if 0 in windows and not mask else []
    if mask or windows - {0}:
        said.append(f"masked attention {train.kernels.attention_masked}")
    return said


AT_ONCE = 2
"""Micro-batches of a step of the check, where the timed one has more: two accumulate as eight do,
and the reference is slow."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure, besides the config."""

    steps: int = 10
    best: bool = False
    """Look for the fastest batch size first."""
    micro_steps: int = 1
    """0: as many as the config's global batch takes."""
    data: Path | None = None
    """Built data set to time with; None: random tokens."""
    check_data: Path | None = None
    """Built data set that the loss check reads; None: `data`, or else the hamlet."""
    check_steps: int = 50
    check_rows: int = 4
    tolerance: float | None = None
    reference: Path | None = None
    """File that keeps the reference's steps for the next bench of the same model and text."""
    memory: float = 0.0
    """GB that we may use, as if on a smaller card; the reference is not held to it. 0: all there
    is."""

    def micro_steps_of(self, config: RunConfig, rows: int) -> int:
        """Of a step in micro-batches of so many rows."""
        if self.micro_steps:
            return self.micro_steps
        sized = config.replace(train={"batch_size": rows})
        return max(1, -(-batch_tokens(sized, 1) // (rows * config.train.seq_len)))

    def portions(self, rows: int, micro_steps: int) -> list[Portion]:
        """The rows of each step of the check: the first has the timed shape."""
        batches = min(micro_steps, AT_ONCE)
        first = later = Portion(batches, rows)
        if self.check_rows:
            later = Portion(batches, max(1, min(self.check_rows, first.total) // batches))
        return ([first] + [later] * (self.check_steps - 1)) if self.check_steps else []


def bench_train(config: RunConfig, asked: BenchOptions, tell: Tell = lambda _: None) -> TrainBench:
    """Measure and check."""
    choice = prepare_device(config.train)
    _refuse_early(config, asked)
    cap_memory(choice.device, asked.memory)
    config, tried, age = _with_best(config, choice, asked, tell)
    rows = config.train.batch_size
    micro_steps = asked.micro_steps_of(config, rows)
    portions = asked.portions(rows, micro_steps)
    text = checked_text(config, asked, portions)
    if text is not None and asked.reference:
        read_reference(asked.reference, config, text, portions)  # another's is refused now
    timed, ours, since_start, how = _ours(config, choice, asked, micro_steps, text, tell)
    tell(f"foundling: {timed.tokens_per_s:,.0f} tokens/s at {timed.rows} rows")
    meter = ThroughputMeter(config, choice, matmul_peak(choice.device, choice.dtype))
    free_cached_memory()
    result = meter.result("foundling", how, timed, age or since_start, tried)
    check = None
    if text is not None and ours is not None:
        tell(f"loss check: {asked.check_steps} steps of the plain reference")
        check = _check(config, asked, choice, text, portions, ours)
    return TrainBench(
        device=device_name(choice.device),
        torch=torch.__version__,
        seq_len=config.train.seq_len,
        data=timed_rows(config, asked).name,
        steps=asked.steps,
        flops_per_token=meter.per_token,
        params=count_params(config.model).no_positions,
        sheet_flops=meter.sheet,
        sheet=meter.source,
        matmul_flops=meter.matmul,
        results=(result,),
        check=check,
    )


def checked_text(
    config: RunConfig, asked: BenchOptions, portions: Sequence[Portion]
) -> BenchRows | None:
    """The text of the loss check; None where there is none."""
    if not portions:
        return None
    row_count = sum(portion.total for portion in portions)
    return text_rows(config, asked.check_data or asked.data, row_count)


def _refuse_early(config: RunConfig, asked: BenchOptions) -> None:
    """What would be found out only after minutes of timing."""
    alone(config)
    if asked.check_data is not None:
        text_rows(config, asked.check_data, 0)
    if asked.reference is not None:
        refuse_other_model(asked.reference, config)
        if not asked.reference.is_file():  # one that is there is only read
            refuse_unwritable(asked.reference, "--reference")


def _check(
    config: RunConfig,
    asked: BenchOptions,
    choice: DeviceChoice,
    text: BenchRows,
    portions: list[Portion],
    ours: Course,
) -> Check:
    """Our steps against the plain trainer's, which keeps every number in fp32 and so may have the
    whole device."""
    lift_cap(choice.device)
    try:
        with translate_out_of_memory():
            plain, source = kept_reference(asked.reference, config, text, portions)
    except torch.OutOfMemoryError as error:
        raise RunError(
            "the loss check's fp32 reference does not fit into the device's memory; give a"
            " --reference FILE made on a larger one, or --check-steps 0."
        ) from error
    finally:
        free_cached_memory()
        cap_memory(choice.device, asked.memory)
    loss_gap, grad_gap = gaps(config, choice.dtype, asked.tolerance)
    return Check(
        text=text.name + (", without dropout" if config.model.dropout else ""),
        rows=(portions[0], portions[-1]),
        ours=ours,
        reference=plain,
        loss_gap=loss_gap,
        grad_gap=grad_gap,
        source=source,
    )


def _ours(
    config: RunConfig,
    choice: DeviceChoice,
    asked: BenchOptions,
    micro_steps: int,
    text: BenchRows | None,
    tell: Tell,
) -> tuple[Timed, Course | None, float, str]:
    """The timed steps, the check's, the process's age after its first step, and what ran."""
    rows, first, ours = timed_rows(config, asked), config.train.batch_size, None
    runner = None
    try:
        with (
            refuse_on_oom(config.train, "give --batch best or a smaller --batch"),
            snapshot_on_oom(cache_folder("oom")),
        ):
            runner = StepRunner(config, choice)
            tell_chosen(runner.chosen, tell)
            with manual_gc() as gc_control:
                if text is None:
                    runner.timed(rows, 1, size=first, warmup=0)
                    age = process_age()
                    gc_control.step()
                else:
                    portions = asked.portions(first, micro_steps)
                    runner.state.model.train(not config.model.dropout)  # as the reference
                    ours = course(runner, text, portions[:1])
                    age = process_age()
                    gc_control.step()
                    later = course(runner, text, portions[1:], taken=1, at=portions[0].total)
                    ours.losses += later.losses
                    runner.state.model.train()
                timed = runner.timed(rows, asked.steps, size=first, micro_steps=micro_steps)
        return timed, ours, age, how_it_ran(runner.config, choice, runner.chosen)
    finally:
        del runner
        free_cached_memory()


def timed_rows(config: RunConfig, asked: BenchOptions) -> BenchRows:
    """The rows that steps are timed with."""
    return random_rows(config) if asked.data is None else text_rows(config, asked.data, 0)


def _with_best(
    config: RunConfig, choice: DeviceChoice, asked: BenchOptions, tell: Tell
) -> tuple[RunConfig, dict[int, float | None], float]:
    """The config with the fastest batch size, what was tried, and the process's age after its first
    step (0 where nothing was tried)."""
    if not asked.best:
        return config, {}, 0.0
    rows, runner = timed_rows(config, asked), None
    tried: dict[int, float | None] = {}
    age = 0.0
    try:
        with translate_out_of_memory():
            runner = StepRunner(config, choice)
        tell_chosen(runner.chosen, tell)
        tried, age = try_sizes(runner, rows, partial(asked.micro_steps_of, config), tell)
    except torch.OutOfMemoryError:
        pass  # not even the weights fit
    finally:
        del runner
        free_cached_memory()
    best = fastest(tried)
    if not best:
        raise RunError("not even one row fits into the device's memory; see `foundling plan`.")
    return config.replace(train={"batch_size": best}), tried, age
