"""The corpus that everybody reads: texts of any source as Parquet files, and one tokenizer."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from foundling.config.errors import DataError
from foundling.data.open_source import open_source, training_texts
from foundling.tokenizer.bpe_trainer import train_tokenizer
from foundling.tokenizer.tokenizer import Tokenizer

FILES = 8
"""Several, because most contenders give each process files of its own."""
VOCABULARY = 16384
LEARN_FROM = 4_000_000
"""Bytes that the default tokenizer learns from: it must be the same for all, not good."""


@dataclass(frozen=True)
class Corpus:
    """Texts on disk."""

    files: tuple[str, ...]
    text_bytes: int
    tokenizer: str


def make_corpus(spec: str, max_bytes: int, tokenizer: Path | None, folder: Path) -> Corpus:
    """Write up to `max_bytes` of a source's text, and a tokenizer where none is given."""
    files, written = [], 0
    texts = _texts(spec)
    (folder / "corpus").mkdir(parents=True, exist_ok=True)
    for number in range(FILES):
        part, size = _take(texts, (max_bytes - written) // (FILES - number))
        if not part:
            break
        files.append(_write(folder / "corpus" / f"part-{number:02d}.parquet", part))
        written += size
    if not files:
        raise DataError(f"{spec} holds no text to measure with; give another --source.")
    own = folder / "tokenizer"
    if tokenizer is not None:
        Tokenizer.load(tokenizer).save(own)
    else:
        train_tokenizer(training_texts([spec], max_bytes=LEARN_FROM), VOCABULARY).save(own)
    return Corpus(tuple(files), written, str(own))


def _texts(spec: str) -> Iterator[str]:
    for row in open_source(spec):
        if row.problem is None and isinstance(row.text, str) and row.text.strip():
            yield row.text


def _take(texts: Iterator[str], max_bytes: int) -> tuple[list[str], int]:
    part: list[str] = []
    size = 0
    for text in texts:
        part.append(text)
        size += len(text.encode("utf-8", "replace"))
        if size >= max_bytes:
            break
    return part, size


def _write(path: Path, texts: list[str]) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": texts}), path)
    return str(path)
