"""Copy packed rows out of a mapped shard into the arrays of a batch.

The hot path of the loader: whole slices and whole index arrays, never a token at a time. Position
i's target is the next token of the same document; it stays IGNORE at a document's end (what follows
is another document's BOS), on padding, and where a chat's mask says that others speak. Tokens and
targets are counted on the way, where it costs nothing.

Legend: R rows to paint, T input positions of a row, N tokens of the shard, P pieces of the rows.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from foundling.data.batch import IGNORE, Canvas, Counts
from foundling.data.packing import BucketPlan, PiecePlan, Plan, StreamPlan
from foundling.data.shard import Shard

Numbers = NDArray[np.int64]


def paint(canvas: Canvas, at: Numbers, shard: Shard, plan: Plan, units: Numbers) -> Counts:
    """Paint the plan's `units` [R] onto the canvas rows `at` [R] and count what they hold.

    A bucket's unit is a canvas of its own.
    """
    if isinstance(plan, StreamPlan):
        return _paint_stream(canvas, at, shard, units * plan.seq_len)
    if isinstance(plan, BucketPlan):
        rows = np.arange(plan.first[units[0]], plan.first[units[0] + 1])
        counts = _paint_pieces(canvas, np.arange(len(rows)), shard, plan.pieces, rows)
        return replace(counts, positions=canvas.inputs.size)  # rows without a document are its own
    return _paint_pieces(canvas, at, shard, plan, units)


def _paint_stream(canvas: Canvas, at: Numbers, shard: Shard, begin: Numbers) -> Counts:
    """Rows of concat: tokens [begin, begin + T) and, as targets, the same one further on."""
    stored, mask, width = shard.tokens, shard.mask, canvas.inputs.shape[1]
    size = np.minimum(width, len(stored) - begin)  # [R]
    counted = 0
    for row, first, full in zip(at.tolist(), begin.tolist(), size.tolist(), strict=True):
        ahead = stored[first + 1 : first + 1 + full]
        if full < width:
            canvas.blank(row, full)
        canvas.inputs[row, :full] = stored[first : first + full]
        targets = canvas.targets[row, : len(ahead)]
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
    flat = canvas.targets.reshape(-1)
    flat[at[which] * width + place - 1] = IGNORE
    inside = place < size[which]
    starts = np.concatenate([at * width, (at[which] * width + place)[inside]])
    canvas.note(at, size, starts)
    tokens = int(size.sum())
    if mask is None:
        counted = tokens - len(ends)
    else:
        counted -= int(np.count_nonzero(mask[ends[ends < len(stored)]]))
    return Counts(len(at) * width, tokens, counted)


def _paint_pieces(
    canvas: Canvas, at: Numbers, shard: Shard, plan: PiecePlan, rows: Numbers
) -> Counts:
    """Rows of pieces, all at once: one index array into the shard, then a slice a row."""
    width = canvas.inputs.shape[1]
    pieces = plan.first[rows + 1] - plan.first[rows]  # [R]
    piece = _spans(plan.first[rows], pieces)  # [P]
    length = plan.lengths[piece].astype(np.int64)
    before = np.cumsum(length) - length  # [P] tokens painted before the piece
    row_first = before[np.cumsum(pieces) - pieces]  # [R] tokens painted before the row
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
        canvas.inputs[row, :full] = inputs[first:stop]
        canvas.targets[row, :full] = targets[first:stop]
        if full < width:
            canvas.blank(row, full)
    starts = before + np.repeat(at * width - row_first, pieces)
    canvas.note(at, np.diff(edges), starts)
    return Counts(len(at) * width, tokens, counted)


def _spans(first: Numbers, counts: Numbers) -> Numbers:
    """first, first + 1, ... for each count: [7, 2], [2, 3] gives [7, 8, 2, 3, 4]."""
    total = np.cumsum(counts)
    if not len(total):
        return np.empty(0, np.int64)
    return np.arange(int(total[-1]), dtype=np.int64) + np.repeat(first - total + counts, counts)
