"""What the loader hands over: arrays of one micro-batch and exact counts of what is in it.

Legend: B rows of a micro-batch, T input positions of a row.
"""

from dataclasses import dataclass, field

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
class Batch:
    """One micro-batch of one rank."""

    inputs: NDArray[np.int64]
    """[B, T] token ids."""
    targets: NDArray[np.int64]
    """[B, T] the next token of the same document, or IGNORE."""
    documents: NDArray[np.int32]
    """[B, T] number of the document within its row, from 0; NO_DOCUMENT where padded."""
    counts: Counts
    """Of the whole batch; rows that only fill the shape count as positions."""
    by_source: dict[str, Counts] = field(default_factory=dict)
    """Of each source's rows."""
    units: dict[str, int] = field(default_factory=dict)
    """Rows taken from each source."""


@dataclass(frozen=True)
class Canvas:
    """The arrays of a batch while rows are being painted into them."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    documents: NDArray[np.int32]

    @classmethod
    def blank(cls, rows: int, seq_len: int) -> "Canvas":
        """All padding: a row nobody paints is a fully masked row."""
        shape = (rows, seq_len)
        return cls(
            np.full(shape, PAD_INPUT, np.int64),
            np.full(shape, IGNORE, np.int64),
            np.full(shape, NO_DOCUMENT, np.int32),
        )
