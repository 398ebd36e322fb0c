"""What the model has eaten: units, positions, tokens and targets, by source, each counted once.

The ledger is kept in every checkpoint and must agree with the loader's position and with
metrics.jsonl; a run in which they disagree stops.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from foundling.config.errors import RunError
from foundling.runtime.dist import sum_over_ranks

if TYPE_CHECKING:  # a probe takes steps without the data room and its Arrow
    from foundling.data import Batch


@dataclass(frozen=True, kw_only=True)
class Eaten:
    """Counts of one source, or of all of them."""

    units: int = 0
    """Packed rows."""
    positions: int = 0
    """Input positions, padding included; drives FLOPs."""
    tokens: int = 0
    """Real input positions; drives the horizon."""
    targets: int = 0
    """Positions counted in the loss; divides it."""

    def __add__(self, other: "Eaten") -> "Eaten":
        return Eaten(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )

    def to_json(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Ledger:
    """Totals by source since the first step of the run."""

    by_source: Mapping[str, Eaten]

    @property
    def total(self) -> Eaten:
        return sum(self.by_source.values(), Eaten())

    def plus(self, step: "Ledger") -> "Ledger":
        """The ledger after one more step."""
        names = dict.fromkeys([*self.by_source, *step.by_source])
        return Ledger(
            {n: self.by_source.get(n, Eaten()) + step.by_source.get(n, Eaten()) for n in names}
        )

    def to_json(self) -> dict[str, Any]:
        return {name: eaten.to_json() for name, eaten in self.by_source.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Mapping[str, int]]) -> "Ledger":
        return cls({name: Eaten(**counts) for name, counts in data.items()})


FILLER = "filler"
"""Rows that only give every rank the same number of micro-batches: positions and nothing else."""


def count_step(batches: "Sequence[Batch]", sources: Sequence[str], device: torch.device) -> Ledger:
    """What one step eats over all ranks; known before the forward pass, so the loss can divide by
    the true global number of targets."""
    names = [*sources, FILLER]
    table = torch.zeros(len(names), 4, dtype=torch.int64)
    for batch in batches:
        for name, counts in batch.by_source.items():
            row = [batch.units.get(name, 0), counts.positions, counts.tokens, counts.targets]
            table[names.index(name)] += torch.tensor(row)
        table[-1, 1] += batch.counts.positions - sum(c.positions for c in batch.by_source.values())
    rows = sum_over_ranks(table.to(device)).tolist()
    return Ledger(
        {
            name: Eaten(units=row[0], positions=row[1], tokens=row[2], targets=row[3])
            for name, row in zip(names, rows, strict=True)
            if any(row)
        }
    )


def check_agreement(
    ledger: Ledger, step: int, rows_per_step: int, metrics: Sequence[Mapping[str, Any]]
) -> None:
    """Ledger, loader position and metrics must tell one story about the first `step` steps."""
    total = ledger.total
    if total.units != step * rows_per_step:
        raise RunError(
            f"the ledger has {total.units} rows and the loader's position is step {step} of"
            f" {rows_per_step} rows; the run directory mixes two runs."
        )
    steps = [line["step"] for line in metrics]
    if steps != list(range(1, step + 1)):
        raise RunError(
            f"metrics.jsonl has {len(steps)} lines up to step {step}; lines are missing or double."
        )
    logged = sum(line["tokens"] for line in metrics)
    if logged != total.tokens:
        raise RunError(
            f"the ledger has {total.tokens} tokens and metrics.jsonl {logged}; one was changed."
        )
