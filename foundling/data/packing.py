"""How the documents of a shard become rows of T input positions: a pure function of the shard.

Both policies keep the same account: **every token is an input exactly once an epoch, and every
token but a document's first is a target exactly once.** A row looks one token ahead (so T + 1
tokens are read) and only within a document.

- `concat`: the shard is one stream cut every T tokens. A row is arithmetic; nothing is stored.
- `bestfit`: a row starts at a document, or at the continuation of one that is longer than a row.
  Only such documents are cut, into pieces of T; the rest goes into the fullest row with room for it
  (best fit, longest first), and what stays free is padding.

Rejected: packing on the fly in a buffer (the buffer is state that a resume must restore, and has
been the cause of repeated data elsewhere), and cropping documents to fill rows (text is lost).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from foundling.config.sections import Packing

Lengths = NDArray[np.int64]


@dataclass(frozen=True)
class ConcatPlan:
    """Row r is tokens [r * T, (r + 1) * T)."""

    tokens: int
    seq_len: int

    @property
    def rows(self) -> int:
        """Rows of the shard; the last may be padded."""
        return -(-self.tokens // self.seq_len)


@dataclass(frozen=True)
class BestfitPlan:
    """Row r is the pieces [first[r], first[r + 1])."""

    seq_len: int
    first: NDArray[np.int64]
    starts: NDArray[np.int64]
    """Where each piece starts in the shard's tokens."""
    lengths: NDArray[np.int32]
    """Input positions of each piece."""
    continues: NDArray[np.uint8]
    """1 where the document goes on in another row, so that the last position has a target."""

    @property
    def rows(self) -> int:
        """Rows of the shard."""
        return len(self.first) - 1

    @cached_property
    def padded(self) -> int:
        """Positions that hold nothing."""
        return self.rows * self.seq_len - int(self.lengths.sum(dtype=np.int64))

    @property
    def cuts(self) -> int:
        """Places where a document was cut."""
        return int(np.count_nonzero(self.continues))


Plan = ConcatPlan | BestfitPlan


def pack(lengths: Lengths, seq_len: int, policy: Packing) -> Plan:
    """Rows of a shard whose documents have these lengths."""
    if policy == "concat":
        return ConcatPlan(int(lengths.sum()), seq_len)
    return _bestfit(np.asarray(lengths, np.int64), seq_len)


def _bestfit(lengths: Lengths, seq_len: int) -> BestfitPlan:
    document, within, size = _pieces(lengths, seq_len)
    row = _place(size, seq_len)
    order = np.argsort(row, kind="stable")  # rows in turn, pieces in order of placement
    document, within, size, row = document[order], within[order], size[order], row[order]
    document_starts = np.cumsum(lengths) - lengths
    rows = int(row[-1]) + 1 if len(row) else 0
    return BestfitPlan(
        seq_len=seq_len,
        first=np.searchsorted(row, np.arange(rows + 1)).astype(np.int64),
        starts=document_starts[document] + within,
        lengths=size.astype(np.int32),
        continues=(within + size < lengths[document]).astype(np.uint8),
    )


def _pieces(lengths: Lengths, seq_len: int) -> tuple[Lengths, Lengths, Lengths]:
    """Cut what is longer than a row; pieces sorted longest first, then in stored order."""
    number = -(-lengths // seq_len)
    document = np.repeat(np.arange(len(lengths)), number)
    place = np.arange(len(document)) - np.repeat(np.cumsum(number) - number, number)
    within = place * seq_len
    size = np.minimum(seq_len, lengths[document] - within)
    longest_first = np.argsort(-size, kind="stable")
    return document[longest_first], within[longest_first], size[longest_first]


def _place(size: Lengths, seq_len: int) -> Lengths:
    """Row of each piece, best fit decreasing; pieces of one length are placed together.

    `rows_with[c]` are the rows with c positions free, and bit c of `some` says there are any, so
    the tightest row that fits is one shift and a lowest bit: no search over rows.
    """
    placed = np.empty(len(size), np.int64)
    rows_with: list[list[int]] = [[] for _ in range(seq_len + 1)]
    some = 0
    opened = 0
    at = 0
    values, counts = np.unique(-size, return_counts=True)
    for length, count in zip((-values).tolist(), counts.tolist(), strict=True):
        end = at + count
        while at < end:
            fitting = some >> length
            if fitting:
                free = length + (fitting & -fitting).bit_length() - 1
                stack = rows_with[free]
                taken = stack[-(end - at) :]
                del stack[-(end - at) :]
                if not stack:
                    some &= ~(1 << free)
            else:
                free = seq_len
                new = -(-(end - at) // (seq_len // length))
                taken = list(range(opened, opened + new))
                opened += new
            placed[at : at + len(taken)] = taken
            at += len(taken)
            if free > length:
                rows_with[free - length].extend(taken)
                some |= 1 << (free - length)
    return placed
