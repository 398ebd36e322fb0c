"""Random rows to take a step on: tokens without order, a function of the row's number alone.

Step 7 has the same tokens in any micro-batches and under any layout, so that what is compared (a
layout, a plain reference) reads the same rows.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from foundling.config.run import RunConfig
from foundling.data.batch import IGNORE, Batch, Bounds, Counts

SOURCE = "bench"
IN_DOCUMENTS = " in documents of an eighth to a half of a row"


class BenchRows(Protocol):
    """Numbered rows."""

    name: str
    """What they are, for the report."""

    def batch(self, first: int, count: int) -> Batch:
        """Rows `first` and the `count` - 1 after it."""


class RandomRows:
    """Tokens without any order, of the whole vocabulary; one document a row, or several."""

    def __init__(self, vocab: int, width: int, seed: int, *, documents: bool = False) -> None:
        self.vocab, self.width, self.seed, self.documents = vocab, width, seed, documents
        self.name = "random tokens" + (IN_DOCUMENTS if documents else "")

    def batch(self, first: int, count: int) -> Batch:
        """Each row from a generator of its own."""
        numbers = range(first, first + count)
        drawn = [np.random.default_rng((self.seed, row)) for row in numbers]
        size = self.width + 1
        tokens = np.stack([row.integers(self.vocab, size=size) for row in drawn])
        return batch_of(tokens, numbers if self.documents else None)


def random_rows(config: RunConfig) -> RandomRows:
    """Random tokens for a config's model, in documents where it masks them: a row of one document
    would be timed at the cost of plain attention."""
    train, mask = config.train, config.data.document_mask
    return RandomRows(config.model.vocab_size, train.seq_len, train.seed, documents=mask)


def batch_of(tokens: NDArray[np.int64], numbers: Sequence[int] | None = None) -> Batch:
    """Rows [B, T + 1] as inputs and the next tokens: each row one document, or several whose ends
    follow from the row's number. The last token of one has no next."""
    inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()
    documents = np.zeros(inputs.shape, dtype=np.int32)
    if numbers is not None:
        documents = np.stack([document_numbers(row, inputs.shape[1]) for row in numbers])
        targets[:, :-1][documents[:, 1:] != documents[:, :-1]] = IGNORE
    counts = Counts(inputs.size, inputs.size, int((targets != IGNORE).sum()))
    bounds = Bounds.of(documents)
    return Batch(inputs, targets, bounds, counts, {SOURCE: counts}, {SOURCE: len(inputs)})


def document_numbers(row: int, width: int) -> NDArray[np.int32]:
    """[T] the document of each position: an eighth to a half of the row each, the last what is
    left."""
    least, most = max(1, width // 8), max(1, width // 2)
    lengths = np.random.default_rng((row, width)).integers(least, most + 1, size=8)
    ends = np.cumsum(lengths)
    return np.searchsorted(ends, np.arange(width), side="right").astype(np.int32)
