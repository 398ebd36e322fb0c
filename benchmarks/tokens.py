"""Texts to tokens for those who bring no way of their own: the `tokenizers` library, as is usual.

One thread a process: whoever wants more takes more processes, of which all get the same number.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

os.environ["TOKENIZERS_PARALLELISM"] = "false"


class Encoder:
    """BOS, text, EOS, as every contender stores a document."""

    def __init__(self, folder: str) -> None:
        import tokenizers

        self.engine = tokenizers.Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        config = json.loads((Path(folder) / "tokenizer_config.json").read_text())
        vocabulary = self.engine.get_vocab(with_added_tokens=True)
        self.bos, self.eos = vocabulary[config["bos_token"]], vocabulary[config["eos_token"]]
        self.dtype: Any = np.uint16 if self.engine.get_vocab_size() <= 1 << 16 else np.uint32

    def documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text."""
        encoded = self.engine.encode_batch_fast(list(texts), add_special_tokens=False)
        return [[self.bos, *one.ids, self.eos] for one in encoded]

    def flat(self, texts: Sequence[str]) -> NDArray[Any]:
        """All of them in one array."""
        return np.concatenate([np.asarray(ids, self.dtype) for ids in self.documents(texts)])


def texts(file: str) -> Iterator[list[str]]:
    """The texts of a Parquet file, a thousand at a time."""
    import pyarrow.parquet as pq

    for batch in pq.ParquetFile(file).iter_batches(batch_size=1000, columns=["text"]):
        yield batch.column("text").to_pylist()


def rows_of(tokens: NDArray[Any], width: int) -> NDArray[Any]:
    """Whole rows of `width` tokens; the rest is dropped, as the usual recipes do."""
    count = len(tokens) // width
    return tokens[: count * width].reshape(count, width)
