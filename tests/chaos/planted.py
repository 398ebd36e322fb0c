"""Bad batches: loss and gradients of some come out wrong on one rank, every time they are read."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from foundling.data.batch import Batch
from foundling.data.batch_reader import BatchReader
from foundling.runtime import files
from foundling.train import step

FACTORS = {"nan": float("nan"), "spike": 1000.0}


def plant(order: str, rank: int, ranks: int) -> Callable[[], None]:
    """`nan:7,spike:14` are faults of batches 7 and 14, in the part of the rank whose turn it is;
    the result takes them back. Before every gradient the point `gradients` is passed."""
    faults = {int(batch): FACTORS[kind] for kind, batch in (o.split(":") for o in order.split(","))}
    real_step, real_add = BatchReader.step, step._accumulate

    def marked(self: BatchReader, number: int) -> list[Batch]:
        batches = real_step(self, number)
        if number in faults and number % ranks == rank:
            batches = [replace(one, units={**one.units, "planted": number}) for one in batches]
        return batches

    def accumulated(state: Any, batches: Any, targets: Any, *rest: Any) -> Any:
        files.failpoint("gradients")
        factor = faults.get(batches[0].units.get("planted", -1), 1)
        if factor == 1:
            return real_add(state, batches, targets, *rest)
        # Before the gradients travel: every rank must come to the same end by what it is told.
        return real_add(state, batches, targets / factor, *rest) * factor

    def undo() -> None:
        BatchReader.step, step._accumulate = real_step, real_add  # type: ignore[method-assign]

    BatchReader.step, step._accumulate = marked, accumulated  # type: ignore[method-assign]
    return undo
