"""Segments of the data order, and the batches that are left out of them."""

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from foundling.config.packing_spec import ALL_PARTS, Packing, PackingSpec

# A segment: what is mixed and how it is packed, from one step on. Plain JSON in a checkpoint.
# Segments are appended, never edited.

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """What is mixed, from `first_sample` on, which is where step `first_step` begins."""

    first_sample: int
    digests: dict[str, str]
    """Digest of each source's manifest; of a source in `shards`, of those shards."""
    weights: dict[str, float]
    """Share of each source in the units, relative to the others."""
    units: dict[str, int]
    """Units in an epoch of each source in this packing; of a source in `shards`, in those
    shards."""
    seq_len: int
    packing: Packing
    rows_per_step: int
    """Units of an optimizer step, over all ranks."""
    first_step: int = 0
    buckets: tuple[int, ...] = ()
    """Packing by bucket: row length of each bucket."""
    bucket_tokens: int = 0
    """Packing by bucket: padded tokens of a unit."""
    shards: dict[str, Span] = field(default_factory=dict)
    """Shards of a followed source that came last: first, and one past the last. Where an earlier
    segment ended at the first, the two are one epoch and none of either is lost or repeated."""
    growing: tuple[str, ...] = ()
    """Followed sources that may still get shards: no unit is read twice while they may."""
    slices: dict[str, Span] = field(default_factory=dict)
    """Parts of 65,536 of a source's documents, by hash, where phases pack it differently."""

    def packing_spec(self, name: str) -> PackingSpec:
        """How one source becomes units here."""
        return PackingSpec(
            seq_len=self.seq_len,
            packing=self.packing,
            edges=self.buckets,
            unit_tokens=self.bucket_tokens,
            part=self.slices.get(name, ALL_PARTS),
        )

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint keeps it."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Segment":
        """The inverse of to_json."""
        lists = {name: tuple(data.get(name, ())) for name in ("buckets", "growing")}
        spans = {
            name: {source: tuple(span) for source, span in data.get(name, {}).items()}
            for name in ("shards", "slices")
        }
        return cls(**{**data, **lists, **spans})


# Batches that are left out: step s reads the s-th batch that is not in the list.
#
# The order of the data stays the function that it was; what the guard left out is one short list of
# ranges in addition to the segments, so a run replays from (seed, segments, skips). Rejected:
# cutting units out of the order itself, which would renumber everything after them.

Range = tuple[int, int]


class Counted(Protocol):
    """What is asked of the order of the data; its steps are batches here."""

    def consumed(self, samples: int) -> dict[str, int]: ...

    def sample_of(self, step: int) -> int: ...


@dataclass(frozen=True)
class Skips:
    """Ranges [first, last) of batch numbers, rising, with batches between them."""

    ranges: tuple[Range, ...] = ()

    def __post_init__(self) -> None:
        edges = [edge for one in self.ranges for edge in one]
        if edges != sorted(set(edges)) or (edges and edges[0] < 0):
            raise ValueError(f"{self.ranges} are not rising ranges with batches between them")

    def plus(self, first: int, last: int) -> "Skips":
        """The same with the batches [first, last) left out too."""
        merged: list[Range] = []
        for low, high in sorted([*self.ranges, *([(first, last)] if first < last else [])]):
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], high))
            else:
                merged.append((low, high))
        return Skips(tuple(merged))

    @property
    def total(self) -> int:
        """How many batches are left out."""
        return sum(last - first for first, last in self.ranges)

    def batch_of(self, step: int) -> int:
        """The batch that step `step` (from 0) reads: its steps before are read or left out."""
        reads_before, _ = self._edges()
        number = bisect_right(reads_before, step)
        return step + sum(last - first for first, last in self.ranges[:number])

    def step_of(self, batch: int) -> int:
        """How many batches before `batch` are read; of one that is read, the step that reads it."""
        return batch - sum(min(last, batch) - first for first, last in self.before(batch))

    def before(self, batch: int) -> tuple[Range, ...]:
        """The ranges that begin before `batch`."""
        return self.ranges[: bisect_right(self._edges()[1], batch - 1)]

    def ahead_of(self, step: int) -> Range | None:
        """The range that lies between the batch of the step before and that of `step`."""
        batch = self.batch_of(step)
        return next((one for one in self.ranges if one[1] == batch), None)

    def stretches(self, first_step: int, last_step: int) -> Iterator[Range]:
        """Steps [first_step, last_step) as runs [first, last) of neighbouring batches."""
        step = first_step
        while step < last_step:
            batch = self.batch_of(step)
            after = next((low for low, _ in self.ranges if low > batch), None)
            stop = batch + last_step - step if after is None else after
            stop = min(stop, batch + last_step - step)
            yield batch, stop
            step += stop - batch

    def units(self, order: Counted, step: int) -> dict[str, int]:
        """Units of each source that lie before the batch of `step` and were left out."""
        left: dict[str, int] = {}
        for first, last in self.before(self.batch_of(step)):
            for name, count in _units(order, first, last).items():
                left[name] = left.get(name, 0) + count
        return left

    def units_ahead_of(self, order: Counted, step: int) -> dict[str, int]:
        """Units of each source that were left out right before `step`; empty as a rule."""
        ahead = self.ahead_of(step)
        return (
            {name: count for name, count in _units(order, *ahead).items() if count} if ahead else {}
        )

    def units_read(self, order: Counted, step: int) -> dict[str, int]:
        """Units of each source that the first `step` steps read: what a ledger must hold."""
        passed = order.consumed(order.sample_of(self.batch_of(step)))
        left = self.units(order, step)
        return {name: count - left.get(name, 0) for name, count in passed.items()}

    def to_json(self) -> list[list[int]]:
        """As a checkpoint keeps it."""
        return [list(one) for one in self.ranges]

    @classmethod
    def from_json(cls, data: Sequence[Sequence[int]]) -> "Skips":
        """The inverse of to_json."""
        return cls(tuple((int(first), int(last)) for first, last in data))

    def _edges(self) -> tuple[list[int], list[int]]:
        """Of each range: the step that would read its first batch, and that batch."""
        firsts = [first for first, _ in self.ranges]
        steps, left = [], 0
        for first, last in self.ranges:
            steps.append(first - left)
            left += last - first
        return steps, firsts


def _units(order: Counted, first: int, last: int) -> dict[str, int]:
    before = order.consumed(order.sample_of(first))
    after = order.consumed(order.sample_of(last))
    return {name: count - before.get(name, 0) for name, count in after.items()}
