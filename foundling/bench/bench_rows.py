"""Rows for a bench: random tokens for speed, text where a loss must fall.

A row is a function of its number, so that step 7 has the same tokens in any micro-batches: the
bench and its plain reference read the same rows.
"""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from foundling.config.errors import DataError
from foundling.config.run import RunConfig
from foundling.data.batch import IGNORE, Batch, Bounds, Counts
from foundling.data.dataset import DataSet
from foundling.data.open_source import training_texts
from foundling.tokenizer.bpe_trainer import train_tokenizer

SOURCE = "bench"
IN_DOCUMENTS = " in documents of an eighth to a half of a row"
HAMLET_VOCABULARY = 1024
LEARN_FROM = 200_000
"""Bytes of the village that its tokenizer learns from: half a second."""


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


class TextRows:
    """A stream of tokens cut into rows; it begins anew when it ends."""

    def __init__(
        self, name: str, tokens: NDArray[np.int64], width: int, *, documents: bool = False
    ) -> None:
        if len(tokens) <= width:
            raise DataError(f"{name} has {len(tokens)} tokens and a row takes {width + 1}.")
        self.name = name + (IN_DOCUMENTS if documents else "")
        self.tokens, self.width, self.documents = tokens, width, documents
        self.count = (len(tokens) - 1) // width

    def batch(self, first: int, count: int) -> Batch:
        """Rows that follow each other in the text."""
        numbers = range(first, first + count)
        at = [row % self.count * self.width for row in numbers]
        tokens = np.stack([self.tokens[s : s + self.width + 1] for s in at])
        return batch_of(tokens, numbers if self.documents else None)


class DataRows:
    """Rows of a built data set, packed as the config packs them."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.set = DataSet(folder)
        needed = self.set.manifest.vocab_size
        if needed > config.model.vocab_size:
            raise DataError(
                f"{folder} has a vocabulary of {needed} and the model of {config.model.vocab_size};"
                " raise model.vocab_size or give another data set."
            )
        self.name = str(folder)
        self.width = config.train.seq_len
        packing = config.data.packing
        self.packing = packing if packing != "bucket" else "bestfit"  # rows of one width
        self.count = self.set.units(self.width, self.packing)
        if not self.count:
            raise DataError(f"{folder} holds no row of {self.width} tokens; lower train.seq_len.")

    def batch(self, first: int, count: int) -> Batch:
        """Units of the data set in their stored order."""
        units = [(first + row) % self.count for row in range(count)]
        return joined([self.set.row(unit, self.width, self.packing) for unit in units])


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


def joined(rows: Sequence[Batch]) -> Batch:
    """Several batches of one width as one."""
    counts = sum((row.counts for row in rows), Counts())
    return Batch(
        np.concatenate([row.inputs for row in rows]),
        np.concatenate([row.targets for row in rows]),
        Bounds.of(np.concatenate([row.documents for row in rows])),
        counts,
        {SOURCE: counts},
        {SOURCE: len(rows)},
    )


def random_rows(config: RunConfig) -> RandomRows:
    """Random tokens for a config's model, in documents where it masks them: a row of one document
    would be timed at the cost of plain attention."""
    train, mask = config.train, config.data.document_mask
    return RandomRows(config.model.vocab_size, train.seq_len, train.seed, documents=mask)


def text_rows(config: RunConfig, data: Path | None, rows: int) -> BenchRows:
    """Text: the data set that was named, or else at least `rows` rows of the made-up hamlet."""
    if data is not None:
        return DataRows(data, config)
    width = config.train.seq_len
    tokens = hamlet_tokens(config.model.vocab_size, rows * width + 1)
    return TextRows("hamlet", tokens, width, documents=config.data.document_mask)


def hamlet_tokens(vocab: int, least: int) -> NDArray[np.int64]:
    """The village's documents as one stream; a small model takes the ids modulo its vocabulary."""
    texts = training_texts(["hamlet"], max_bytes=LEARN_FROM)
    learned = train_tokenizer(texts, HAMLET_VOCABULARY)
    found: list[int] = []
    texts = training_texts(["hamlet"], max_bytes=16 * least)
    while len(found) < least and (some := list(islice(texts, 500))):
        for ids in learned.encode_batch(some):
            found += ids
    return np.asarray(found, np.int64) % vocab
