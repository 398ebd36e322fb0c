"""A batch that memory does not suffice for is halved, and the next ones are no larger.

An evaluation's batch is a matter of speed only, so running out is no reason to end: 003 lost a run
to a validation that did not fit. Only a single item that does not fit alone is an error.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from foundling.config.errors import RunError
from foundling.generate.engine import Engine
from foundling.runtime.console import warn
from foundling.runtime.device import ran_out

T = TypeVar("T")
R = TypeVar("R")


@dataclass
class Budget:
    """How much goes through the model at once; shrinks when memory runs out."""

    size: int
    fixed: bool = False
    """Ranks that compute one model together cannot halve on their own: let the error out."""

    def halve(self) -> None:
        """From now on half as much."""
        self.size = max(1, self.size // 2)
        warn(f"memory ran out; batches of the evaluation are halved, to {self.size:,}.")


def run_halving(
    batch: Sequence[T], work: Callable[[Sequence[T]], R], budget: Budget
) -> Iterator[tuple[Sequence[T], R]]:
    """The parts of a batch that were done together, each with its result."""
    waiting = [batch]
    while waiting:
        part = waiting.pop(0)
        try:
            result = work(part)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if budget.fixed or len(part) < 2 or not ran_out(error):
                raise
        else:
            yield part, result
            continue
        # Outside of the handler: its traceback would keep the tensors that are in the way.
        release()
        budget.halve()
        middle = len(part) // 2
        waiting = [part[:middle], part[middle:], *waiting]


@contextmanager
def told_when_short() -> Iterator[None]:
    """Memory that does not suffice for one example alone is a sentence for a person."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        raise RunError(
            "memory does not suffice for a single example; use --dtype bf16 or a larger device, or"
            " leave out the task with the longest texts (what was done is kept)."
        ) from error


def run_with_fewer_rows(
    engine: Engine, rows: int, work: Callable[[], R], *, fixed: bool = False
) -> R:
    """`work`, which gives an engine so many rows; it takes half as many at a time whenever memory
    runs out."""
    while True:
        try:
            return work()
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if fixed or min(rows, engine.max_batch) < 2 or not ran_out(error):
                raise
        release()
        engine.max_batch = min(rows, engine.max_batch) // 2
        warn(f"memory ran out; from now on {engine.max_batch} replies are written at once.")


def release() -> None:
    """Give back what is not in use."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_cut(model: nn.Module) -> bool:
    """Whether ranks hold parts of the weights and so compute every batch together."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())
