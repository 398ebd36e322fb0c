"""Batch, its counts, and the buffer that packed rows are collated into."""

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from foundling.data.packing import BucketPlan, PiecePlan, Plan, StreamPlan
from foundling.data.shard import Shard

# Legend: B rows of a micro-batch, T input positions of a row, D documents of the micro-batch.

IGNORE = -100
"""Target of a position that the loss does not count."""
PAD_INPUT = 0
"""Input at a padded position: any valid id does, because nothing real ever looks at it."""
NO_DOCUMENT = -1
"""Document number of a padded position."""


@dataclass(frozen=True)
class Counts:
    """Three counts, always named, because they differ and mixing them up has cost whole runs."""

    positions: int = 0
    """Input positions, padding included; drives flops."""
    tokens: int = 0
    """Real input positions; drives the horizon and the ledger."""
    targets: int = 0
    """Positions counted in the loss; divides it."""

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.positions + other.positions,
            self.tokens + other.tokens,
            self.targets + other.targets,
        )


@dataclass(frozen=True)
class Bounds:
    """Where documents begin and end; padding is at the end of a row."""

    filled: NDArray[np.int32]
    """[B] real tokens of each row."""
    starts: NDArray[np.int32]
    """[D] first position of each document in the flattened batch [B * T], rising."""

    @classmethod
    def of(cls, documents: NDArray[np.integer]) -> "Bounds":
        """From the numbers of the documents [B, T]."""
        real = documents >= 0
        begins = real.copy()
        begins[:, 1:] &= documents[:, 1:] != documents[:, :-1]
        starts = np.flatnonzero(begins).astype(np.int32)
        return cls(np.count_nonzero(real, axis=1).astype(np.int32), starts)


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank."""

    inputs: NDArray[np.int64]
    """[B, T] token ids."""
    targets: NDArray[np.int64]
    """[B, T] the next token of the same document, or IGNORE."""
    bounds: Bounds
    """The documents of each row."""
    counts: Counts
    """Of the whole batch; rows that only fill the shape count as positions."""
    by_source: dict[str, Counts] = field(default_factory=dict)
    """Of each source's rows."""
    units: dict[str, int] = field(default_factory=dict)
    """Units taken from each source."""

    @cached_property
    def documents(self) -> NDArray[np.int32]:
        """[B, T] number of the document within its row, from 0; NO_DOCUMENT where padded.

        Worked out when asked for: most runs never ask.
        """
        rows, width = self.inputs.shape
        numbers = np.zeros((rows, width), np.int32)
        numbers.reshape(-1)[self.bounds.starts] = 1
        numbers[:, 0] = 0
        np.cumsum(numbers, axis=1, out=numbers)
        for row in np.flatnonzero(self.bounds.filled < width).tolist():
            numbers[row, self.bounds.filled[row] :] = NO_DOCUMENT
        return numbers


class BatchBuffer:
    """The arrays of a batch while rows are being copied into them.

    Nothing is filled beforehand: a row that got no tokens becomes padding in `finished`.
    """

    def __init__(self, rows: int, width: int) -> None:
        self.inputs = np.empty((rows, width), np.int64)
        self.targets = np.empty((rows, width), np.int64)
        self.filled = np.zeros(rows, np.int32)
        self._starts: list[NDArray[np.int64]] = []

    def note(
        self, at: NDArray[np.int64], filled: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> None:
        """Rows `at` were copied: how full they are and where their documents start (flat)."""
        self.filled[at] = filled
        self._starts.append(starts)

    def blank(self, row: int, first: int) -> None:
        """Make a row padding from position `first` on."""
        self.inputs[row, first:] = PAD_INPUT
        self.targets[row, first:] = IGNORE

    def finished(self, by_source: dict[str, Counts], units: dict[str, int]) -> Batch:
        """The batch, once everything is copied; what was copied is counted in `by_source`."""
        for row in np.flatnonzero(self.filled == 0).tolist():
            self.blank(row, 0)
        starts = np.concatenate([np.empty(0, np.int64), *self._starts]).astype(np.int32)
        starts.sort()
        copied = sum(by_source.values(), Counts())
        return Batch(
            inputs=self.inputs,
            targets=self.targets,
            bounds=Bounds(self.filled, starts),
            counts=Counts(self.inputs.size, copied.tokens, copied.targets),
            by_source=by_source,
            units=units,
        )


# Copy packed rows out of a mapped shard into the arrays of a batch.
#
# The hot path of the loader: whole slices and whole index arrays, never a token at a time. Position
# i's target is the next token of the same document; it stays IGNORE at a document's end (what
# follows is another document's BOS), on padding, and where a chat's mask says that the token is not
# the assistant's. Tokens and targets are counted on the way, where it costs nothing.
#
# Legend: R rows to copy, T input positions of a row, N tokens of the shard, P pieces of the rows.

Numbers = NDArray[np.int64]


def collate_into(
    buffer: BatchBuffer, at: Numbers, shard: Shard, plan: Plan, units: Numbers
) -> Counts:
    """Copy the plan's `units` [R] into the buffer's rows `at` [R] and count what they hold.

    A bucket's unit fills a whole buffer.
    """
    if isinstance(plan, StreamPlan):
        return _copy_stream(buffer, at, shard, units * plan.seq_len)
    if isinstance(plan, BucketPlan):
        rows = np.arange(plan.first[units[0]], plan.first[units[0] + 1])
        counts = _copy_pieces(buffer, np.arange(len(rows)), shard, plan.pieces, rows)
        return replace(counts, positions=buffer.inputs.size)  # rows without a document are its own
    return _copy_pieces(buffer, at, shard, plan, units)


def _copy_stream(buffer: BatchBuffer, at: Numbers, shard: Shard, begin: Numbers) -> Counts:
    """Rows of concat: tokens [begin, begin + T) and, as targets, the same one further on."""
    stored, mask, width = shard.tokens, shard.mask, buffer.inputs.shape[1]
    size = np.minimum(width, len(stored) - begin)  # [R]
    counted = 0
    for row, first, full in zip(at.tolist(), begin.tolist(), size.tolist(), strict=True):
        ahead = stored[first + 1 : first + 1 + full]
        if full < width:
            buffer.blank(row, full)
        buffer.inputs[row, :full] = stored[first : first + full]
        targets = buffer.targets[row, : len(ahead)]
        if mask is None:
            targets[:] = ahead
        else:
            counts = mask[first + 1 : first + 1 + full] != 0
            counted += int(np.count_nonzero(counts))
            np.copyto(targets, IGNORE)
            np.copyto(targets, ahead, where=counts)
    low, high = (shard.offsets.searchsorted(edge, side="right") for edge in (begin, begin + size))
    which = np.repeat(np.arange(len(at)), high - low)
    ends = shard.offsets[_spans(low, high - low)]  # documents that end in these rows
    place = ends - begin[which]  # in 1..T
    flat = buffer.targets.reshape(-1)
    flat[at[which] * width + place - 1] = IGNORE
    inside = place < size[which]
    starts = np.concatenate([at * width, (at[which] * width + place)[inside]])
    buffer.note(at, size, starts)
    tokens = int(size.sum())
    if mask is None:
        counted = tokens - len(ends)
    else:
        counted -= int(np.count_nonzero(mask[ends[ends < len(stored)]]))
    return Counts(len(at) * width, tokens, counted)


def _copy_pieces(
    buffer: BatchBuffer, at: Numbers, shard: Shard, plan: PiecePlan, rows: Numbers
) -> Counts:
    """Rows of pieces, all at once: one index array into the shard, then a slice a row."""
    width = buffer.inputs.shape[1]
    pieces = plan.first[rows + 1] - plan.first[rows]  # [R]
    piece = _spans(plan.first[rows], pieces)  # [P]
    length = plan.lengths[piece].astype(np.int64)
    before = np.cumsum(length) - length  # [P] tokens copied before the piece
    row_first = before[np.cumsum(pieces) - pieces]  # [R] tokens copied before the row
    tokens = int(length.sum())
    source = np.repeat(plan.starts[piece] - before, length)
    source += np.arange(tokens)
    inputs = shard.tokens.take(source)
    source += 1
    ahead = shard.tokens.take(source, mode="clip")  # the shard's last token looks at itself
    ends = (before + length - 1)[plan.continues[piece] == 0]
    if shard.mask is None:
        targets = ahead.astype(np.int64)
        targets[ends] = IGNORE
        counted = tokens - len(ends)
    else:
        counts = shard.mask.take(source, mode="clip") != 0
        counts[ends] = False
        targets = np.where(counts, ahead, np.int64(IGNORE))
        counted = int(np.count_nonzero(counts))
    edges = [*row_first.tolist(), tokens]
    for row, first, stop in zip(at.tolist(), edges, edges[1:], strict=False):
        full = stop - first
        buffer.inputs[row, :full] = inputs[first:stop]
        buffer.targets[row, :full] = targets[first:stop]
        if full < width:
            buffer.blank(row, full)
    starts = before + np.repeat(at * width - row_first, pieces)
    buffer.note(at, np.diff(edges), starts)
    return Counts(len(at) * width, tokens, counted)


def _spans(first: Numbers, counts: Numbers) -> Numbers:
    """first, first + 1, ... for each count: [7, 2], [2, 3] gives [7, 8, 2, 3, 4]."""
    total = np.cumsum(counts)
    if not len(total):
        return np.empty(0, np.int64)
    return np.arange(int(total[-1]), dtype=np.int64) + np.repeat(first - total + counts, counts)
