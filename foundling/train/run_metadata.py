"""run.json: config, plan and machine when a run begins; predicted and measured when it ends."""

import contextlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foundling.checkpoint.manifest import read_manifest
from foundling.checkpoint.reader import tensor_specs
from foundling.checkpoint.remote import Folder
from foundling.config.data import DataConfig
from foundling.plan.hardware import Gpu, find_gpu, name_of_device
from foundling.plan.supply import as_counts, asked_for, by_documents, tokens_table
from foundling.runtime.console import size
from foundling.runtime.device import DeviceChoice, device_name
from foundling.runtime.run_dir import RunDir
from foundling.runtime.run_reader import read_events, step_lines
from foundling.train.autotune.harness import sheet_peak
from foundling.train.dataloader import DataLoader
from foundling.train.state import TrainState

MFU_DEFINITION = (
    "(6 N + 12 L H D T) x positions/s over sheet_flops of each process' device, N without tables"
    " that are only looked up, attention over the full square; matmul_share: over matmul_flops, the"
    " rate of a square product measured at the run's start"
)
PROBE_STEPS = 30
"""Steps after which the duration is predicted; the first third warms caches up and is left out."""


def peaks_of(run: RunDir, choice: DeviceChoice, ranks: int) -> dict[str, float]:
    """FLOP/s of all ranks together, by the name of the share that is taken of them."""
    found, sheet = {"matmul_share": run.read_info()["matmul_flops"] * ranks}, sheet_peak(choice)
    return found | ({"mfu": sheet[0] * ranks} if sheet else {})


def measured_figures(
    run: RunDir, state: TrainState, since_last_line: Mapping[str, float], newest: Folder
) -> dict[str, float]:
    """The predicted figures as measured, from the run's own records and its last checkpoint;
    `since_last_line` are seconds that no line of metrics.jsonl holds."""
    lines = list(step_lines(run))
    measured = read_events(run).measured
    # A line with start_s is the first step of a process, which compiles.
    usual = [line["step_s"] for line in lines if "start_s" not in line]
    usual_s = statistics.median(usual or [line["step_s"] for line in lines] or [math.nan])
    first = (line["step_s"] for line in lines if "start_s" in line)
    compiled = sum(max(0.0, seconds - usual_s) for seconds in first)

    def seconds_of(what: str, *groups: Sequence[Mapping[str, Any]]) -> float:
        return sum(float(line.get(what, 0)) for lines in groups for line in lines)

    return {
        "parameters": sum(
            math.prod(spec.shape)
            for name, spec in tensor_specs(newest).items()
            if name.startswith("model.")
        ),
        "steps": state.step,
        "tokens": state.ledger.total.tokens,
        "first_loss": lines[0]["loss"] if lines else math.nan,
        "checkpoint_bytes": read_manifest(newest).size,
        "start_s": seconds_of("start_s", lines) + since_last_line.get("start_s", 0.0),
        "compile_s": compiled,
        "train_s": sum(line["step_s"] for line in lines) - compiled,
        "save_s": seconds_of("save_s", lines) + since_last_line.get("save_s", 0.0),
        "eval_s": seconds_of("seconds", measured["evaluated"], measured["sampled"]),
        "tasks_s": seconds_of("seconds", measured["scored"]),
        "step_s": usual_s,
        "memory_peak": max((line["memory_peak"] for line in lines), default=0),
    }


def tokens_read(kind: str, data: DataConfig, state: TrainState, loader: DataLoader) -> list[str]:
    """The run's ledger as a table, with the mixture as achieved and as asked for."""
    order = loader.order
    epochs = order.epochs(order.sample_of(loader.position(state.step)))
    sources = {
        name: counts.to_json() for name, counts in state.ledger.by_source_without_filler.items()
    }
    table = tokens_table([(kind, as_counts(sources, epochs))])
    if data.weights_by == "documents":
        documents = {name: dataset.stored.documents for name, dataset in loader.datasets.items()}
        table += by_documents(epochs, documents)
    return [*table, *asked_for(data)]


# What was predicted for a run on the devices it has been given, and whether it keeps to it.
#
# Only where there is something to rest on: a GPU of the table, or a device whose ceilings were
# measured (`foundling plan TARGET --probe`). A guess about an unmeasured CPU would only cry wolf.

PLAN_TOLERANCE = 0.15


@dataclass(frozen=True)
class PlanComparison:
    """The prediction of a run, completed from its first steps where its device was unknown."""

    run: RunDir
    seconds_by_part: Callable[[float], dict[str, float]]
    """The seconds of the whole run by part, given those of a step."""

    def predicted(self, step_s: float) -> dict[str, float]:
        """The prediction in run.json; seconds that it lacks are worked out from a step's."""
        plan = self.run.read_info()["plan"]
        predicted: dict[str, float] = plan["predicted"]
        if "train_s" not in predicted:  # nothing was known of this device
            found = self.seconds_by_part(step_s)
            predicted |= {name: s for name, s in found.items() if name not in predicted}
            with contextlib.suppress(OSError):  # a full disk; the last save will report it
                self.run.update_info(plan=plan)
        return predicted


def known_device(device: torch.device) -> Gpu | None:
    """The table's entry for this device, if a prediction can rest on it."""
    if device.type == "cuda":
        name = name_of_device(device_name(device))
        return find_gpu(name) if name else None
    cpu = find_gpu("cpu") if device.type == "cpu" else None
    return cpu if cpu and cpu.ceilings else None


def planned_and_measured(
    predicted: Mapping[str, float], measured: Mapping[str, float]
) -> list[str]:
    """A line for each figure that was planned and measured."""
    lines = []
    for name, what in {"step_s": "a step", "memory_peak": "the peak of memory"}.items():
        planned, found = predicted.get(name) or 0, measured.get(name)
        if planned and found is not None:
            said = [size(v) if name == "memory_peak" else f"{v:.4g} s" for v in (planned, found)]
            off = f"{found / planned - 1:+.0%}"
            lines.append(f"{what} was planned at {said[0]} and is {said[1]} ({off})")
    return lines


def overruns(predicted: Mapping[str, float], measured: Mapping[str, float]) -> list[str]:
    """A sentence for each figure that is more than planned by more than the tolerance."""
    words = {
        "step_s": ("slower", "a step takes", "s"),
        "memory_peak": ("larger", "it holds", "bytes"),
    }
    return [
        f"the run is {found / planned - 1:.0%} {word} than planned: {verb} {found:,.4g} {unit} and"
        f" {planned:,.4g} were planned; `foundling plan TARGET --probe` says where."
        for name, (word, verb, unit) in words.items()
        if (planned := predicted.get(name) or 0)
        and (found := measured.get(name, 0)) > planned * (1 + PLAN_TOLERANCE)
    ]
