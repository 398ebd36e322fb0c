"""Rows of text for a bench: a stream or a data set, where a loss must fall.

A row is a function of its number, so that step 7 has the same tokens in any micro-batches: the
bench and its plain reference read the same rows.
"""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foundling.config.errors import DataError
from foundling.config.run import RunConfig
from foundling.data.batch import Batch, Bounds, Counts
from foundling.data.dataset import DataSet
from foundling.data.open_source import training_texts
from foundling.profiling.step_runner import IN_DOCUMENTS, SOURCE, BenchRows, batch_of
from foundling.tokenizer.bpe_trainer import train_tokenizer

HAMLET_VOCABULARY = 1024
LEARN_FROM = 200_000
"""Bytes of the village that its tokenizer learns from: half a second."""


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
