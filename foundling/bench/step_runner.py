"""The trainer's own step under a bench: built as a run builds it, timed without being disturbed.

Batches are drawn before the clock starts, as the loader draws them ahead of a run. On CUDA a mark
is put into the device's stream after each step and read when all are done: waiting for the device
in between would count bubbles that a run does not have. Rejected: one clock around all steps, which
tells no median.
"""

import gc
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Protocol

import torch

from foundling.bench.bench_rows import SOURCE, BenchRows
from foundling.config.errors import ConfigError
from foundling.config.run import RunConfig
from foundling.data.batch import Batch
from foundling.parallel.mesh import ALONE
from foundling.profiling.dry_run import DryRun
from foundling.runtime.device import (
    DeviceChoice,
    memory_usage,
    reset_peak_memory,
    synchronise,
    translate_out_of_memory,
)
from foundling.runtime.progress import process_age
from foundling.train.autotune.present_machine import report_choices
from foundling.train.state import TrainState
from foundling.train.step import StepOptions, StepResult, train_step

WARM_UP = 3
TRY_STEPS = 4
"""Timed for each batch size that is tried; the best is timed again in full."""
Tell = Callable[[str], None]


@dataclass
class Timed:
    """What some steps took."""

    rows: int
    """Of a micro-step."""
    micro_steps: int
    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    allocated: int = 0
    """Bytes at the peak of the timed steps."""
    reserved: int = 0
    positions: int = 0
    """Of a step."""

    @property
    def seconds(self) -> float:
        """Of the median step."""
        return median(self.step_s)

    @property
    def tokens_per_s(self) -> float:
        """Positions of a step over the median step."""
        return self.positions / self.seconds


class Stepper(Protocol):
    """A trainer whose steps are timed: ours, or a contender's."""

    def timed(
        self, rows: BenchRows, count: int, *, size: int, micro_steps: int = 1, warmup: int = WARM_UP
    ) -> Timed:
        """Take `warmup` steps of micro-batches of `size` rows and then `count` that are timed."""

    def recover(self) -> None:
        """After a step that did not fit: forget what it left and give the memory back."""


class StepRunner:
    """A config built for steps on one device."""

    def __init__(self, config: RunConfig, choice: DeviceChoice) -> None:
        alone(config)
        trial = DryRun(config, ALONE, choice, watch_updates=False)
        self.config, self.device = trial.config, choice.device
        self.chosen: list[str] = trial.chosen
        """Which kernels were taken here, and why."""
        self.state: TrainState = trial.state

    def step(self, batches: Sequence[Batch], lr: float, *, measure: bool = False) -> StepResult:
        """One optimizer step, and its numbers."""
        options = StepOptions(
            lr=lr,
            clip=self.config.optim.clip,
            sources=[SOURCE],
            document_mask=self.config.data.document_mask,
            measure_update=measure,
        )
        return train_step(self.state, batches, options)

    @translate_out_of_memory()
    def timed(
        self, rows: BenchRows, count: int, *, size: int, micro_steps: int = 1, warmup: int = WARM_UP
    ) -> Timed:
        """As Stepper says."""
        each = size * micro_steps
        drawn = [
            [rows.batch(step * each + micro * size, size) for micro in range(micro_steps)]
            for step in range(min(warmup + count, 4))
        ]
        found = Timed(size, micro_steps, positions=sum(b.counts.positions for b in drawn[0]))
        self._losses(drawn[number % len(drawn)] for number in range(warmup))
        reset_peak_memory(self.device)
        marks = Marks(self.device)
        steps = (drawn[number % len(drawn)] for number in range(warmup, warmup + count))
        found.losses = self._losses(steps, marks.mark)
        found.step_s = marks.seconds()
        found.allocated = self.state.memory()["memory_peak"]
        found.reserved = peak_reserved(self.device)
        return found

    def _losses(
        self, steps: Iterable[Sequence[Batch]], after: Callable[[], None] = lambda: None
    ) -> list[float]:
        losses = []
        for batches in steps:
            losses.append(self.step(batches, self.timed_lr).loss)
            after()
        return losses

    @property
    def timed_lr(self) -> float:
        """Random tokens must not lead the weights astray."""
        return self.config.optim.lr / 10

    def recover(self) -> None:
        """As Stepper says."""
        forget_step(self.state.optimizer)
        free(self.device)


def forget_step(optimizer: torch.optim.Optimizer) -> None:
    """Drop gradients and moments: memory may have run out while a parameter's state was being made,
    and no optimizer finds out that half of it is missing. The next step makes them anew."""
    optimizer.zero_grad(set_to_none=True)
    optimizer.state.clear()


def try_sizes(
    stepper: Stepper, rows: BenchRows, micro_steps: Callable[[int], int], tell: Tell
) -> tuple[dict[int, float | None], float]:
    """Speed by batch size, up to the fastest and around it; and the process's age after the first
    step of all. `micro_steps` gives those of a step for the rows of one."""
    ages: list[float] = []

    def measure(size: int) -> float | None:
        found = None
        stepper.recover()  # segments of another size's tensors would be in the way
        try:
            if not ages:
                stepper.timed(rows, 1, size=size, warmup=0)
                ages.append(process_age())
            found = stepper.timed(rows, TRY_STEPS, size=size, micro_steps=micro_steps(size))
        except torch.OutOfMemoryError:
            pass  # only outside of this block its traceback is gone, and what the frames hold
        if found is None:
            tell(f"{size} rows do not fit")
            return None
        tell(f"{size} rows: {found.tokens_per_s:,.0f} tokens/s")
        return found.tokens_per_s

    tried = best_batch(measure)
    return tried, ages[0] if ages else 0.0


def tell_chosen(chosen: Sequence[str], tell: Tell) -> None:
    """Say which kernels were taken; a fallback is a warning, as in a run."""
    report_choices(chosen, lambda line: tell(f"chosen: {line}"))


class Marks:
    """Times between marks on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        synchronise(device)
        self.mark()

    def mark(self) -> None:
        """Something is done here, once the device has come so far."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """From each mark to the next."""
        synchronise(self.device)
        if self.cuda:
            pairs = zip(self._events, self._events[1:], strict=False)
            return [before.elapsed_time(after) / 1e3 for before, after in pairs]
        return [b - a for a, b in zip(self._times, self._times[1:], strict=False)]


def alone(config: RunConfig, *, rows: bool = True, words: bool = True) -> None:
    """Refuse what one process cannot show, and what no step can be taken of: a part of one may need
    no `rows` of a micro-batch or no vocabulary (`words`)."""
    degrees = {name: getattr(config.parallel, name) for name in ("replicate", "shard", "tensor")}
    if many := {name: value for name, value in degrees.items() if value > 1}:
        name, value = next(iter(many.items()))
        raise ConfigError(
            f"parallel.{name} is {value} and this bench measures one device; leave it at its"
            " default, or see `foundling bench train --layouts all`."
        )
    if rows and config.train.batch_size < 1:
        raise ConfigError("train.batch_size is left to the plan; give --batch N or --batch best.")
    if words and config.model.vocab_size < 1:
        raise ConfigError("model.vocab_size is 0 and no data says it; give --model.vocab-size.")


def peak_reserved(device: torch.device) -> int:
    """The most that torch has asked of the device."""
    return memory_usage(device)["memory_peak_reserved"]


def free(device: torch.device) -> None:
    """Free cached memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def refuse_cap(device: torch.device, gigabytes: float) -> None:
    """A cap where nothing can be capped."""
    if gigabytes and device.type != "cuda":
        raise ConfigError("--limit-gb caps a GPU's memory and there is none here; leave it out.")


def cap_memory(device: torch.device, gigabytes: float) -> None:
    """Let this process use so much of the device, as if it were a smaller card; 0: all of it."""
    refuse_cap(device, gigabytes)
    if not gigabytes:
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * 1e9 / total), device)


def lift_cap(device: torch.device) -> None:
    """Let this process use the whole device again."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0, device)


# The batch size that is fastest: doubled until it is slower or does not fit, then refined.
#
# Speed over batch size has one hump in practice (kernels fill up, then memory gets tight), so a
# climb finds it; its strides end at FINEST rows: docs/performance.md has the 1.24B model's figures
# at 44.

STEP, FINEST = 8, 4
WORSE = 0.98
"""Of the best so far: a doubling below it ends the search upwards."""
Measure = Callable[[int], float | None]
"""Rows to tokens a second; None where they do not fit."""


def best_batch(measure: Measure, most: int = 1024) -> dict[int, float | None]:
    """Every size that was tried and its speed; the fastest is `fastest(found)`."""
    found: dict[int, float | None] = {}

    def speed(rows: int) -> float:
        if rows not in found:
            found[rows] = measure(rows)
        return found[rows] or 0.0

    rows, top = STEP, 0.0
    while rows <= most:
        now = speed(rows)
        if not now or now < WORSE * top:
            break
        top, rows = max(top, now), 2 * rows
    rows = STEP // 2
    while not any(found.values()) and rows >= 1:  # not even eight fit
        speed(rows)
        rows //= 2
    if (best := fastest(found)) >= STEP:
        _climb(speed, best, max(found))
    return found


def _climb(speed: Callable[[int], float], best: int, limit: int) -> None:
    """Go by smaller and smaller strides to where no neighbour is faster."""
    stride = best // 2 // FINEST * FINEST
    while stride >= FINEST:
        for rows in (best + stride, best - stride):
            if STEP <= rows <= limit and speed(rows) > speed(best):
                best = rows
                break
        stride = stride // 2 // FINEST * FINEST


def largest_batch(
    peak: Callable[[int], int | None],
    *,
    most: int,
    room: int = 0,
    known: Mapping[int, int | None] | None = None,
) -> int:
    """The largest size that fits, to the row; 0 where none does.

    `peak` takes a step of so many rows and gives its bytes, or None if it does not fit. Bytes grow
    in a straight line with rows, so two sizes that fit foretell where `room` ends, and a try or two
    around that place settles it; where the line deceives, the interval is halved.
    """
    found = dict(known or {})
    while True:
        fits = {rows: held for rows, held in found.items() if held is not None}
        low = max(fits, default=0)
        high = min((rows for rows in found if rows > low and rows not in fits), default=most + 1)
        if high - low <= 1:
            return low
        rows = _foretold(fits, room) if len(fits) > 1 and room else 2 * low or 1
        if rows <= low:  # the end is foretold here: see whether one more fits
            rows = low + 1
        elif rows >= high:
            rows = (low + high) // 2
        found[rows] = peak(rows)


def _foretold(fits: Mapping[int, int], room: int) -> int:
    """Where the line through the smallest and the largest size meets the end of the memory."""
    few, many = min(fits), max(fits)
    slope = (fits[many] - fits[few]) / (many - few)
    return many + int((room - fits[many]) / slope) if slope > 0 else 2 * many


def fastest(found: dict[int, float | None]) -> int:
    """The size with the best speed; 0 where none fits."""
    fitting = {rows: speed for rows, speed in found.items() if speed}
    return max(fitting, key=lambda rows: fitting[rows]) if fitting else 0


# What is refused before minutes of measuring: unknown names, files that cannot be written,
# options that would do nothing.


def refuse_unknown(asked: Iterable[object], known: Iterable[object]) -> None:
    """Words of --only that name nothing."""
    there = [str(name) for name in known]
    for word in map(str, asked):
        if word not in there:
            raise ConfigError(f"--only {word} is unknown here; there are {', '.join(there)}.")


def refuse_unwritable(path: Path, option: str) -> None:
    """A file that could not be written in the end; nothing is made here."""
    home = path.absolute().parent
    while not home.exists():
        home = home.parent
    writable = os.access(path if path.exists() else home, os.W_OK)
    if path.is_dir() or not home.is_dir() or not writable:
        raise ConfigError(f"{option} {path} cannot be written; give another file.")


def refuse_unused(given: Mapping[str, object], because: str) -> None:
    """Options that were given (not None) and have no effect."""
    for option, value in given.items():
        if value is not None:
            raise ConfigError(f"{option} has no effect {because}; leave it out.")
