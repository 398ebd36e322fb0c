"""The order of the data as a function: sample i comes from (seed, segments, i) and nothing else.

A segment fixes what is mixed and how it is packed from one sample on; segments are appended, never
edited. Within a segment the source of a sample comes from the table of 65,536 slots, and the unit
within that source's epoch from a keyed bijection. So resuming is one integer, seeking costs the
same anywhere, and the number of ranks does not enter. Rejected: shuffle buffers and iterators with
state, which must be replayed or are quietly wrong at another world size.

Shuffles are keyed by the digest of a source's manifest, not by its name or folder: moving a data
set does not change the run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundling.config.errors import DataError
from foundling.config.mixture import SLOTS, slot_counts, slot_table
from foundling.config.sections import Packing
from foundling.data.keyed import permute, round_keys


@dataclass(frozen=True, kw_only=True)
class Segment:
    """What is mixed, from `first_sample` on."""

    first_sample: int
    digests: dict[str, str]
    """Digest of each source's manifest."""
    weights: dict[str, float]
    """Share of each source, relative to the others."""
    units: dict[str, int]
    """Units in an epoch of each source, under this length and packing."""
    seq_len: int
    packing: Packing

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint keeps it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Segment":
        """The inverse of to_json."""
        return cls(**data)


@dataclass(frozen=True)
class UnitRef:
    """Where a sample is found."""

    source: str
    epoch: int
    unit: int


@dataclass(frozen=True)
class Located:
    """Where a run of samples is found; `sources` are indices into `names`."""

    names: tuple[str, ...]
    sources: NDArray[np.int64]
    epochs: NDArray[np.int64]
    units: NDArray[np.int64]


class Order:
    """The endless sequence of units that every rank of every world size reads from."""

    def __init__(self, seed: int, segments: Sequence[Segment]) -> None:
        self.seed = seed
        self.segments = tuple(segments)
        firsts = [segment.first_sample for segment in self.segments]
        if not firsts or firsts[0] != 0 or sorted(set(firsts)) != firsts:
            raise DataError(
                f"the data order's segments start at samples {firsts}; the first must start at 0"
                " and each later one after the one before it."
            )
        self.names = tuple(sorted({name for s in self.segments for name in s.weights}))
        self._firsts = np.array(firsts, np.int64)
        self._tables: list[_Table] = []
        for segment in self.segments:
            self._tables.append(_Table(segment, self.names, self._tables))

    def appended(self, segment: Segment) -> "Order":
        """The same order up to the segment's first sample, and the segment from there on."""
        return Order(self.seed, (*self.segments, segment))

    def segment_at(self, sample: int) -> Segment:
        """The segment that a sample belongs to."""
        return self.segments[self._number(sample)]

    def locate(self, sample: int) -> UnitRef:
        """Where one sample is found."""
        at = self.locate_range(sample, 1)
        return UnitRef(at.names[at.sources[0]], int(at.epochs[0]), int(at.units[0]))

    def locate_range(self, first: int, count: int) -> Located:
        """Where the samples [first, first + count) are found."""
        low, high = self._number(first), self._number(first + count - 1)
        edges = [first, *self._firsts[low + 1 : high + 1].tolist(), first + count]
        parts = [
            table.locate(np.arange(start, stop, dtype=np.int64), self.seed)
            for table, start, stop in zip(self._tables[low:], edges, edges[1:], strict=False)
        ]
        sources, epochs, units = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        return Located(self.names, sources, epochs, units)

    def consumed(self, samples: int) -> dict[str, int]:
        """Units of each source among the first `samples`, by arithmetic; a ledger must agree."""
        total = np.zeros(len(self.names), np.int64)
        for number, table in enumerate(self._tables):
            start = int(self._firsts[number])
            last = number + 1 == len(self._tables)
            stop = samples if last else min(samples, int(self._firsts[number + 1]))
            if stop > start:
                total += table.units_before(stop)
        return dict(zip(self.names, total.tolist(), strict=True))

    def _number(self, sample: int) -> int:
        return int(self._firsts.searchsorted(sample, side="right")) - 1


class _Table:
    """One segment's slots, with the place of each slot among those of its source.

    A source's *turn* counts its units from the beginning of time: turn // size is the epoch and
    turn % size the place in that epoch's shuffle.
    """

    def __init__(
        self, segment: Segment, names: tuple[str, ...], earlier: Sequence["_Table"]
    ) -> None:
        self.segment = segment
        counts = slot_counts({name: segment.weights[name] for name in sorted(segment.weights)})
        number_of = np.array([names.index(name) for name in counts], np.int64)
        self.slots = number_of[np.frombuffer(slot_table(counts), np.uint16)]
        self.where = [np.flatnonzero(self.slots == number) for number in range(len(names))]
        self.counts = np.array([len(where) for where in self.where], np.int64)
        self.rank = np.empty(SLOTS, np.int64)
        for where in self.where:
            self.rank[where] = np.arange(len(where))
        self.names = names
        self.sizes = np.array([segment.units.get(name, 1) for name in names], np.int64)
        if (self.sizes[number_of] < 1).any():
            empty = [name for name in counts if segment.units.get(name, 0) < 1]
            raise DataError(f"{', '.join(empty)} holds no units; build it from more text.")
        self.starts = np.array([self._start(name, earlier) for name in names], np.int64)

    def _start(self, name: str, earlier: Sequence["_Table"]) -> int:
        """First turn of a source: go on where the last segment left it, or at its next epoch.

        Places in an epoch mean something only for the same data cut the same way; if either
        changed, the rest of the epoch is left unread.
        """
        if name not in self.segment.weights:
            return 0
        ends = [table.segment.first_sample for table in (*earlier[1:], self)]
        for table, end in reversed(list(zip(earlier, ends, strict=False))):
            if name not in table.segment.weights:
                continue
            turn = int(table.turns_before(end)[table.names.index(name)])
            if table._cut(name) == self._cut(name):
                return turn
            epochs = -(-turn // int(table.sizes[table.names.index(name)]))
            return epochs * self.segment.units[name]
        return 0

    def _cut(self, name: str) -> tuple[object, ...]:
        segment = self.segment
        return (
            segment.digests[name],
            segment.units[name],
            segment.seq_len,
            segment.packing,
        )

    def units_before(self, sample: int) -> NDArray[np.int64]:
        """Units that each source gives to this segment before `sample`."""
        cycle, slot = divmod(sample - self.segment.first_sample, SLOTS)
        partial = np.array([where.searchsorted(slot) for where in self.where], np.int64)
        return cycle * self.counts + partial

    def turns_before(self, sample: int) -> NDArray[np.int64]:
        """The turn each source has reached at `sample`."""
        return self.starts + self.units_before(sample)

    def locate(
        self, samples: NDArray[np.int64], seed: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Source, epoch and unit of each sample."""
        cycles, slots = np.divmod(samples - self.segment.first_sample, SLOTS)
        sources = self.slots[slots]
        turns = self.starts[sources] + cycles * self.counts[sources] + self.rank[slots]
        epochs, places = np.divmod(turns, self.sizes[sources])
        units = np.empty_like(places)
        for source in np.unique(sources).tolist():
            name = self.names[source]
            of_source = np.flatnonzero(sources == source)
            digest, size = self.segment.digests[name], self.segment.units[name]
            seen, which = np.unique(epochs[of_source], return_inverse=True)
            keys = np.stack([round_keys(seed, digest, epoch) for epoch in seen.tolist()], axis=1)
            shuffles = keys[:, 0] if len(seen) == 1 else keys[:, which]
            units[of_source] = permute(places[of_source], size, shuffles)
        return sources, epochs, units
