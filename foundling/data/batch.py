"""What the loader hands over: arrays of one micro-batch and exact counts of what is in it.

Legend: B rows of a micro-batch, T input positions of a row, D documents of the micro-batch.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

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

    @cached_property
    def cu_seqlens(self) -> NDArray[np.int32]:
        """Where each document starts in the flattened batch [B * T], and its end: what attention
        over documents of varying length takes. The padding of a row counts as one more document."""
        rows, width = self.inputs.shape
        short = np.flatnonzero(self.bounds.filled < width)
        padding = short * width + self.bounds.filled[short]
        edges = np.concatenate([self.bounds.starts, padding, [rows * width]])
        edges.sort()
        return edges.astype(np.int32)

    @property
    def max_seqlen(self) -> int:
        """The longest document of the batch (or padding of a row)."""
        return int(np.diff(self.cu_seqlens).max())


class Canvas:
    """The arrays of a batch while rows are being painted into them.

    Nothing is filled beforehand: a row that nobody paints is blanked when the batch is finished.
    """

    def __init__(self, rows: int, width: int) -> None:
        self.inputs = np.empty((rows, width), np.int64)
        self.targets = np.empty((rows, width), np.int64)
        self.filled = np.zeros(rows, np.int32)
        self._starts: list[NDArray[np.int64]] = []

    def note(
        self, at: NDArray[np.int64], filled: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> None:
        """Rows `at` were painted: how full they are and where their documents start (flat)."""
        self.filled[at] = filled
        self._starts.append(starts)

    def blank(self, row: int, first: int) -> None:
        """Make a row padding from position `first` on."""
        self.inputs[row, first:] = PAD_INPUT
        self.targets[row, first:] = IGNORE

    def finished(self, by_source: dict[str, Counts], units: dict[str, int]) -> Batch:
        """The batch, once everything is painted; what was painted is counted in `by_source`."""
        for row in np.flatnonzero(self.filled == 0).tolist():
            self.blank(row, 0)
        starts = np.concatenate([np.empty(0, np.int64), *self._starts]).astype(np.int32)
        starts.sort()
        painted = sum(by_source.values(), Counts())
        return Batch(
            inputs=self.inputs,
            targets=self.targets,
            bounds=Bounds(self.filled, starts),
            counts=Counts(self.inputs.size, painted.tokens, painted.targets),
            by_source=by_source,
            units=units,
        )
