"""The batch size of a bench: the fastest one; and what is refused before anything is timed.

Speed over batch size has one hump in practice (kernels fill up, then memory gets tight), so it is
doubled until it is slower or does not fit, and a climb by smaller strides finds the top:
docs/performance.md has the 1.24B model's figures at 44.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch

from foundling.config.errors import ConfigError
from foundling.config.run import RunConfig
from foundling.profiling.step_runner import WARM_UP, BenchRows, Tell, Timed
from foundling.runtime.progress import process_age

TRY_STEPS = 4
"""Timed for each batch size that is tried; the best is timed again in full."""
STEP, FINEST = 8, 4
WORSE = 0.98
"""Of the best so far: a doubling below it ends the search upwards."""
Measure = Callable[[int], float | None]
"""Rows to tokens a second; None where they do not fit."""


class Stepper(Protocol):
    """A trainer whose steps are timed: ours, or a contender's."""

    def timed(
        self, rows: BenchRows, count: int, *, size: int, micro_steps: int = 1, warmup: int = WARM_UP
    ) -> Timed:
        """Take `warmup` steps of micro-batches of `size` rows and then `count` that are timed."""

    def recover(self) -> None:
        """After a step that did not fit: forget what it left and give the memory back."""


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


def fastest(found: dict[int, float | None]) -> int:
    """The size with the best speed; 0 where none fits."""
    fitting = {rows: speed for rows, speed in found.items() if speed}
    return max(fitting, key=lambda rows: fitting[rows]) if fitting else 0


# What is refused before minutes of measuring: unknown names, files that cannot be written,
# options that would do nothing.


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


def refuse_unknown(
    asked: Iterable[object], known: Iterable[object], option: str = "--only"
) -> None:
    """Words of an option that name nothing."""
    there = [str(name) for name in known]
    for word in map(str, asked):
        if word not in there:
            raise ConfigError(f"{option} {word} is unknown here; there are {', '.join(there)}.")


def refuse_unwritable(path: Path, option: str) -> None:
    """A file that could not be written in the end; nothing is made here."""
    home = path.absolute().parent
    while not home.exists():
        home = home.parent
    writable = os.access(path if path.exists() else home, os.W_OK)
    if path.is_dir() or not home.is_dir() or not writable:
        raise ConfigError(f"{option} {path} cannot be written; give another file.")


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
