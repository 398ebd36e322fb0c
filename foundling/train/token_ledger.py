"""Token ledger: units, positions, tokens and targets that were read of each source, counted once.

Every step's line in metrics.jsonl has them, and the totals are kept in every checkpoint. They must
agree with each other and with the order of the data, which knows by arithmetic how many units of
each source come before a step; a run in which they disagree stops.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from foundling.config.errors import MissingOrDamagedError, RunError
from foundling.data.segments import Counted, Skips
from foundling.runtime.dist import sum_over_ranks
from foundling.runtime.run_dir import COUNTS, RunDir
from foundling.runtime.run_reader import step_lines

if TYPE_CHECKING:  # a probe takes steps without the data room and its Arrow
    from foundling.data.batch import Batch


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """Counts of one source, or of all of them."""

    units: int = 0
    """Packed rows, or a bucket's micro-batches."""
    positions: int = 0
    """Input positions, padding included; drives FLOPs."""
    tokens: int = 0
    """Real input positions; drives the horizon."""
    targets: int = 0
    """Positions counted in the loss; divides it."""

    def __add__(self, other: "TokenCounts") -> "TokenCounts":
        mine, others = self.to_json(), other.to_json()
        return TokenCounts(**{name: mine[name] + others[name] for name in mine})

    def to_json(self) -> dict[str, int]:
        return dict(vars(self))


@dataclass(frozen=True)
class Ledger:
    """Token counts by source, of one step or of the run so far."""

    by_source: Mapping[str, TokenCounts]

    @property
    def total(self) -> TokenCounts:
        return sum(self.by_source.values(), TokenCounts())

    @property
    def by_source_without_filler(self) -> dict[str, TokenCounts]:
        return {name: counts for name, counts in self.by_source.items() if name != FILLER}

    def plus(self, step: "Ledger") -> "Ledger":
        """The ledger after one more step."""
        before, more, none = self.by_source, step.by_source, TokenCounts()
        return Ledger({n: before.get(n, none) + more.get(n, none) for n in {**before, **more}})

    def to_json(self) -> dict[str, Any]:
        return {name: counts.to_json() for name, counts in self.by_source.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Mapping[str, int]]) -> "Ledger":
        return cls({name: TokenCounts(**counts) for name, counts in data.items()})


FILLER = "filler"
"""Rows that only give every rank the same number of micro-batches: positions and nothing else."""


@dataclass(frozen=True)
class StepCounts:
    """What one step read, over all ranks."""

    ledger: Ledger
    row_len: float
    """Length of a row, averaged over positions; buckets of several lengths may meet in a step."""


def count_step(
    batches: "Sequence[Batch]", sources: Sequence[str], device: torch.device
) -> StepCounts:
    """What one step reads over all ranks; known before the forward pass, so the loss can divide by
    the true global number of targets."""
    names = [*sources, FILLER]
    table = torch.zeros(len(names) + 1, 4, dtype=torch.int64)
    for batch in batches:
        for name, counts in batch.by_source.items():
            row = [batch.units.get(name, 0), counts.positions, counts.tokens, counts.targets]
            table[names.index(name)] += torch.tensor(row)
        table[-2, 1] += batch.counts.positions - sum(c.positions for c in batch.by_source.values())
        table[-1, 1] += batch.counts.positions * batch.inputs.shape[1]
    if dist.is_initialized():  # alone, a look at the device would wait for all of its work
        table = sum_over_ranks(table.to(device), "counts")
    rows = table.tolist()
    weighted = rows.pop()[1]
    ledger = Ledger(
        {
            name: TokenCounts(units=row[0], positions=row[1], tokens=row[2], targets=row[3])
            for name, row in zip(names, rows, strict=True)
            if any(row)
        }
    )
    return StepCounts(ledger, weighted / max(ledger.total.positions, 1))


def sources_read(read: Ledger, epochs: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """What a step read of each source, and how often that was read by the end of it."""
    return {
        name: {**counts.to_json(), "epochs": round(epochs.get(name, 0.0), 9)}
        for name, counts in read.by_source_without_filler.items()
    }


NONE_SKIPPED = Skips()


def check_position(ledger: Ledger, order: Counted, step: int, skips: Skips = NONE_SKIPPED) -> None:
    """The ledger must hold, source by source, the units that the order puts before `step` and that
    were not left out."""
    wanted, read = skips.units_read(order, step), ledger.by_source_without_filler
    for name in dict.fromkeys([*wanted, *read]):
        found = read.get(name, TokenCounts()).units
        if found != wanted.get(name, 0):
            raise RunError(
                f"the ledger has {found} units of {name} and the loader's position, step {step},"
                f" is after {wanted.get(name, 0)}; the run directory mixes two runs."
            )


def check_agreement(
    ledger: Ledger, order: Counted, step: int, run: RunDir, skips: Skips = NONE_SKIPPED
) -> None:
    """Refuse a ledger, loader position and metrics.jsonl that disagree about the first steps."""
    check_position(ledger, order, step, skips)
    remedy = remedy_for_lost_lines(run, step)
    lines = _first_steps(run, step, remedy)
    try:
        odd = list(_disagreements(ledger, lines))
    except (KeyError, TypeError, AttributeError):
        odd = ["a line of metrics.jsonl does not say what it should"]
    if odd:
        raise MissingOrDamagedError(f"{run.path}: {odd[0]}; {remedy}.")


def remedy_for_lost_lines(run: RunDir, step: int) -> str:
    """What is left to do where lines of a run are lost."""
    return (
        f"bring the file back from a copy, or begin another run with the weights (--start"
        f" {run.path}@{step} --run ANOTHER)"
    )


def _first_steps(run: RunDir, step: int, remedy: str) -> list[Mapping[str, Any]]:
    """The lines of the first `step` steps, each there once."""
    damaged: Counter[str] = Counter()
    kept = [line for line in step_lines(run, damaged) if line["step"] <= step]
    if [line["step"] for line in kept] != list(range(1, step + 1)):
        text = f", {damaged.total()} damaged" if damaged else ""
        raise MissingOrDamagedError(
            f"{run.metrics_path} has {len(kept)} lines up to step {step}{text}: lines are missing"
            f" or double; {remedy}."
        )
    return kept


def _disagreements(ledger: Ledger, lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    written: dict[str, Counter[str]] = {}
    for line in lines:
        for name, counts in line["sources"].items():
            row = written.setdefault(name, Counter())
            for field in COUNTS:
                row[field] += counts[field]
    for name, counts in ledger.by_source_without_filler.items():
        for field, value in counts.to_json().items():
            found = written.get(name, Counter())[field]
            if found != value:
                yield f"the ledger has {value} {field} of {name} and metrics.jsonl {found}"
    for field in ("positions", "tokens", "targets"):
        value, found = getattr(ledger.total, field), sum(line[field] for line in lines)
        if found != value:
            yield f"the ledger has {value} {field} and metrics.jsonl {found}"
