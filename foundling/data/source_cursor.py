"""One source within one segment: which turn it is at, and which unit each turn is.

Where a source goes on, and where it must start its next epoch, is decided here. Places in an epoch
mean something only for the same documents cut the same way. A later segment that cuts the same
documents in another way starts the next epoch and says what was left unread; one that reads other
documents (declared phases deal them out by hash) does not mind.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from foundling.config.errors import DataError
from foundling.config.mixture import SLOTS, slot_counts, slot_table
from foundling.config.packing_spec import PackingSpec
from foundling.data.permutation import permute, round_keys
from foundling.data.segments import Segment, Span

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Unread:
    """Units that an epoch was ended without."""

    source: str
    step: int
    """The step from which the source has another packing."""
    epoch: int
    units: int
    """Of the packing before."""
    of: int
    """Units that epoch had."""


@dataclass(frozen=True)
class ShuffleGroup:
    """Units that are shuffled among themselves: all of a source, or the shards of one wave."""

    digest: str
    units: int


@dataclass(frozen=True)
class SourceCursor:
    """A source's turns in one segment."""

    packing_spec: PackingSpec
    shards: Span | None
    blocks: tuple[ShuffleGroup, ...]
    """In the order in which an epoch reads them."""
    start: int = 0
    """The turn at which the segment finds the source."""
    unread: tuple[Unread, ...] = ()

    @cached_property
    def size(self) -> int:
        """Units in an epoch."""
        return sum(block.units for block in self.blocks)

    def locate(self, given: Numbers, seed: int) -> tuple[Numbers, Numbers]:
        """Epoch and unit of the source's so-manieth turns of the segment."""
        epochs, places = np.divmod(self.start + given, self.size)
        if len(self.blocks) == 1:
            return epochs, _shuffled(self.blocks[0], epochs, places, seed)
        sizes = np.array([block.units for block in self.blocks], np.int64)
        firsts = np.cumsum(sizes) - sizes
        which = np.searchsorted(np.cumsum(sizes), places, side="right")
        units = np.empty_like(places)
        for number, block in enumerate(self.blocks):
            mine, first = np.flatnonzero(which == number), firsts[number]
            if not len(mine):
                continue
            units[mine] = first + _shuffled(block, epochs[mine], places[mine] - first, seed)
        return epochs, units


def _shuffled(block: ShuffleGroup, epochs: Numbers, places: Numbers, seed: int) -> Numbers:
    first, last = int(epochs[0]), int(epochs[-1])  # turns follow each other, so epochs rise
    if first == last:
        return permute(places, block.units, round_keys(seed, block.digest, first))
    seen = range(first, last + 1)
    keys = np.stack([round_keys(seed, block.digest, epoch) for epoch in seen], axis=1)
    return permute(places, block.units, keys[:, epochs - first])


@dataclass(frozen=True)
class CursorPosition:
    """How far a source has been read in one packing."""

    track: SourceCursor
    turn: int

    @property
    def epochs(self) -> int:
        """Epochs that were begun."""
        return -(-self.turn // self.track.size)


Past = tuple[CursorPosition, ...]
"""What is known of a source from earlier segments: one entry a packing, the last read last."""


Reads = tuple[tuple[SourceCursor, int], ...]
"""Units that were read of a source, one entry a packing."""


def extended(past: Past, track: SourceCursor, turn: int) -> Past:
    """The past after one more segment in which the source got as far as `turn`."""
    kept = (reached for reached in past if not _goes_on(reached.track, track))
    return (*kept, CursorPosition(track, turn))


def begin_track(segment: Segment, name: str, past: Past) -> SourceCursor:
    """The track of a source in a segment: it goes on, or starts its next epoch."""
    spec, shards = segment.packing_spec(name), segment.shards.get(name)
    own = ShuffleGroup(segment.digests[name], segment.units[name])
    track = SourceCursor(spec, shards, _blocks(own, spec, shards, past))
    if track.size < 1:
        raise DataError(f"{name} holds no units; build it from more text.")
    same = next((reached for reached in past if _goes_on(reached.track, track)), None)
    others = [r for r in past if r is not same and _share_documents(r.track, track)]
    epochs = max((reached.epochs for reached in others), default=0)
    if same is not None and same.turn // track.size >= epochs:
        return replace(track, start=same.turn)
    unread = tuple(
        Unread(
            source=name,
            step=segment.first_step,
            epoch=reached.turn // reached.track.size,
            units=-reached.turn % reached.track.size,
            of=reached.track.size,
        )
        for number, reached in enumerate(past)
        if reached in others
        and reached.turn % reached.track.size
        # Else the epoch was ended before, and it was said then.
        and not any(_share_documents(later.track, reached.track) for later in past[number + 1 :])
    )
    return replace(track, start=epochs * track.size, unread=unread)


def added(read: Reads, track: SourceCursor, units: int) -> Reads:
    """Units read of a source by packing, and some more; waves of one epoch are one and grow."""
    same = [(old, count) for old, count in read if _goes_on(old, track)]
    kept = [pair for pair in read if pair not in same]
    return (*kept, (track, units + sum(count for _, count in same)))


def _goes_on(before: SourceCursor, after: SourceCursor) -> bool:
    """Whether the turns of `after` are those of `before`, with or without a wave more."""
    is_same = before.packing_spec == after.packing_spec
    return is_same and before.blocks == after.blocks[: len(before.blocks)]


def _share_documents(one: SourceCursor, other: SourceCursor) -> bool:
    (low, high), (first, last) = one.packing_spec.part, other.packing_spec.part
    return low < last and first < high


def _blocks(
    own: ShuffleGroup, spec: PackingSpec, shards: Span | None, past: Past
) -> tuple[ShuffleGroup, ...]:
    """All blocks of an epoch: those of earlier waves of the same source, and its own."""
    for track in (reached.track for reached in reversed(past)):
        if shards is None or track.shards is None or track.packing_spec != spec:
            continue
        if track.shards == shards and track.blocks[-1] == own:
            return track.blocks
        if track.shards[1] == shards[0]:
            return (*track.blocks, own)
    return (own,)


class ScheduleSlots:
    """The table of slots of one mixture, with the place of each slot among those of its source."""

    def __init__(self, weights: tuple[tuple[str, float], ...]) -> None:
        counts = slot_counts(dict(weights))
        self.names = tuple(counts)
        self.counts = np.array(list(counts.values()), np.int64)
        self._source = np.frombuffer(slot_table(counts), np.uint16).astype(np.int64)
        self._where = [np.flatnonzero(self._source == number) for number in range(len(counts))]
        self._rank = np.empty(SLOTS, np.int64)
        for where in self._where:
            self._rank[where] = np.arange(len(where))

    def given(self, samples: int) -> Numbers:
        """Units of each source among the first `samples`."""
        cycle, slot = divmod(samples, SLOTS)
        partial = np.array([where.searchsorted(slot) for where in self._where], np.int64)
        return cycle * self.counts + partial

    def turns(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        """Source of each sample, and how many of that source's came before it."""
        cycles, slots = np.divmod(samples, SLOTS)
        sources = self._source[slots]
        return sources, cycles * self.counts[sources] + self._rank[slots]

    def when(self, source: int, turn: int) -> int:
        """The sample that is the source's so-manieth (from 0)."""
        cycle, rank = divmod(turn, int(self.counts[source]))
        return cycle * SLOTS + int(self._where[source][rank])


@lru_cache(maxsize=64)
def slots_of(weights: tuple[tuple[str, float], ...]) -> ScheduleSlots:
    """The slots of a mixture; segments that follow a growing source share one table."""
    return ScheduleSlots(weights)
