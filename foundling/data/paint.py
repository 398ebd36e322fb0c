"""Copy packed rows out of a mapped shard into the arrays of a batch.

The hot path of the loader: whole slices and whole index arrays, never a token at a time. Position
i's target is the next token of the same document; it stays IGNORE at a document's end (what follows
is another document's BOS), on padding, and where a chat's mask says that others speak.

Legend: R rows to paint, T input positions of a row, N tokens of the shard, P pieces of the rows.
"""

import numpy as np
from numpy.typing import NDArray

from foundling.data.batch import IGNORE, Canvas
from foundling.data.packing import BestfitPlan, ConcatPlan, Plan
from foundling.data.shard import Shard

Rows = NDArray[np.int64]


def paint(canvas: Canvas, at: Rows, shard: Shard, plan: Plan, rows: Rows) -> None:
    """Paint the plan's `rows` [R] onto the canvas rows `at` [R], which must be blank."""
    if isinstance(plan, ConcatPlan):
        for place, row in zip(at.tolist(), rows.tolist(), strict=True):
            _paint_stream(canvas, place, shard, row * plan.seq_len)
    else:
        _paint_pieces(canvas, at, shard, plan, rows)


def _paint_stream(canvas: Canvas, place: int, shard: Shard, start: int) -> None:
    """One row of concat: tokens [start, start + T) and, as targets, the same one further on."""
    inputs, targets, documents = (
        canvas.inputs[place],
        canvas.targets[place],
        canvas.documents[place],
    )
    size = min(len(inputs), len(shard.tokens) - start)
    ahead = shard.tokens[start + 1 : start + 1 + size]
    inputs[:size] = shard.tokens[start : start + size]
    targets[: len(ahead)] = ahead
    if shard.mask is not None:
        others = shard.mask[start + 1 : start + 1 + size] == 0
        targets[: len(ahead)][others] = IGNORE
    first, last = shard.offsets.searchsorted((start, start + size), side="right")
    ends = shard.offsets[first:last] - start  # documents that end in this row, in 1..size
    targets[ends - 1] = IGNORE
    documents[:size] = 0
    documents[ends[:-1] if last > first and ends[-1] == size else ends] = 1
    np.cumsum(documents[:size], out=documents[:size])


def _paint_pieces(canvas: Canvas, at: Rows, shard: Shard, plan: BestfitPlan, rows: Rows) -> None:
    """Rows of bestfit, all at once: one index array into the shard and one into the canvas."""
    seq_len = plan.seq_len
    pieces = plan.first[rows + 1] - plan.first[rows]  # [R]
    number = _count_up(pieces)  # [P] number of the piece in its row
    piece = np.repeat(plan.first[rows], pieces) + number  # [P]
    length = plan.lengths[piece].astype(np.int64)
    before = np.cumsum(length) - length  # [P] tokens painted before the piece
    row_before = np.repeat(before[np.cumsum(pieces) - pieces], pieces)
    goes_to = np.repeat(at, pieces) * seq_len + before - row_before  # [P] flat place of the piece
    ramp = np.arange(int(length.sum()), dtype=np.int64)
    source = ramp + np.repeat(plan.starts[piece] - before, length)
    place = ramp + np.repeat(goes_to - before, length)
    canvas.inputs.reshape(-1)[place] = shard.tokens[source]
    canvas.documents.reshape(-1)[place] = np.repeat(number.astype(np.int32), length)
    source += 1
    if source[-1] == len(shard.tokens) or (source == len(shard.tokens)).any():
        np.minimum(source, len(shard.tokens) - 1, out=source)
    ahead = shard.tokens[source].astype(np.int64)
    if shard.mask is not None:
        ahead[shard.mask[source] == 0] = IGNORE
    ends = before + length - 1
    ahead[ends[plan.continues[piece] == 0]] = IGNORE
    canvas.targets.reshape(-1)[place] = ahead


def _count_up(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, ... restarting for each count: [2, 3] gives [0, 1, 0, 1, 2]."""
    total = np.cumsum(counts)
    return np.arange(int(total[-1]), dtype=np.int64) - np.repeat(total - counts, counts)
