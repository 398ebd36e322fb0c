"""Part files: what phase 1 of a build leaves on disk, each whole or absent.

A part is a run of rows of one piece: its documents with their tokens, and beside each document what
the later phases ask about it (held out, hash of its content, overlap with an evaluation set, number
of its row). What a part holds depends on its rows alone, so any worker may write it, twice if need
be. The ends of parts leave no trace in the data set.

A part need not last: what a power cut leaves of it is known by its checksums and made again. So
no write waits for the disk here, and a short build's parts are gone before they ever reach it.
"""

import hashlib
import json
import zlib
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundling.config.errors import DataError
from foundling.data.shard import (
    Shard,
    column,
    numbers,
    read_arrow,
    shard_from_batch,
    shard_to_batch,
    write_arrow,
)

Hashes = NDArray[np.uint64]
"""[documents, 2]: 128 bits each."""


@dataclass(frozen=True, kw_only=True)
class PartFile:
    """Encoded rows."""

    documents: Shard
    held_out: NDArray[np.bool_]
    """Which of the documents belong to val."""
    overlaps: NDArray[np.bool_]
    """Which share a passage with an evaluation set."""
    hashes: Hashes
    """Of the tokens: equal ones are duplicates."""
    row: NDArray[np.int32]
    """Number of each document's row within the part."""
    rows: int
    quarantine: list[dict[str, Any]]
    """Unusable rows: number within the part, source, where, reason, excerpt; of one at which a file
    breaks off, the rows that are lost after it."""
    tally: dict[str, int] = field(default_factory=dict)
    """What the reader left out on the way, by reason."""

    @property
    def train_tokens(self) -> int:
        """Tokens of the documents for training."""
        return int(np.diff(self.documents.offsets)[~self.held_out].sum())


@dataclass(frozen=True, kw_only=True)
class PartInfo:
    """What a part holds in a few numbers: all that is kept in memory for every part."""

    path: str
    documents: int
    tokens: int
    train_tokens: int
    rows: int
    bad: int
    text_bytes: int
    """UTF-8 bytes of what was usable."""
    broken: bool
    """Whether a file breaks off in it."""
    lost: int
    """Rows that are lost there."""
    unknown: int
    """Tokens that stand for text which the tokenizer has no token for."""


def content_hashes(documents: Shard) -> Hashes:
    """128 bits of sha256: with a trillion documents, the odds of one false match are 1 in 10^15.

    Of the tokens and not of the text: they are what a model would see twice, and fewer bytes.
    """
    bounds = (documents.offsets * documents.tokens.itemsize).tolist()
    data = np.ascontiguousarray(documents.tokens).data.cast("B")
    digests = [hashlib.sha256(data[a:b]).digest()[:16] for a, b in pairwise(bounds)]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64).reshape(-1, 2)


def _checksum(part: PartFile) -> int:
    """Of everything but the tokens, which have their hashes."""
    documents = part.documents
    columns: list[NDArray[Any]] = [
        documents.offsets,
        documents.text_bytes,
        documents.kind_codes,
        documents.floor_bits,
        part.held_out,
        part.overlaps,
        part.hashes,
        part.row,
    ]
    if documents.mask is not None:
        columns.append(documents.mask)
    found = 0
    for values in columns:
        found = zlib.crc32(np.ascontiguousarray(values).data, found)
    return found


def write_part(path: Path, part: PartFile, *, durable: bool = False) -> PartInfo:
    """Write a part, whole or not at all; a `durable` one survives a power cut, which is for
    parts that are not checked again."""
    lost = [note["lost"] for note in part.quarantine if "lost" in note]
    counts = {
        "documents": len(part.documents),
        "tokens": len(part.documents.tokens),
        "train_tokens": part.train_tokens,
        "rows": part.rows,
        "bad": len(part.quarantine),
        "text_bytes": int(part.documents.text_bytes.sum()),
        "broken": bool(lost),
        "lost": sum(lost),
        "unknown": part.tally.get("unknown_tokens", 0),
    }
    batch = shard_to_batch(part.documents)
    for name, values in (
        ("held_out", part.held_out.view(np.uint8)),
        ("overlaps", part.overlaps.view(np.uint8)),
        ("hash_high", part.hashes[:, 0]),
        ("hash_low", part.hashes[:, 1]),
        ("row", part.row),
    ):
        batch = batch.append_column(name, column(values))
    notes = {"quarantine": part.quarantine, "tally": part.tally}
    metadata = {
        "counts": json.dumps(counts),
        "notes": json.dumps(notes),
        "crc32": str(_checksum(part)),
    }
    write_arrow(path, batch.replace_schema_metadata(metadata), durable=durable)
    return PartInfo(path=str(path), **counts)


def read_info(path: Path) -> PartInfo | None:
    """The numbers of a part; None if it cannot be read."""
    try:
        return PartInfo(path=str(path), **json.loads(read_arrow(path).schema.metadata[b"counts"]))
    except (DataError, KeyError, TypeError, ValueError):
        return None


def is_whole(path: Path) -> bool:
    """Whether every byte of a part that an earlier start left is what was written."""
    try:
        part = read_part(path)
        stated = int(read_arrow(path).schema.metadata[b"crc32"])
    except (DataError, KeyError, TypeError, ValueError):
        return False
    return _checksum(part) == stated and np.array_equal(part.hashes, content_hashes(part.documents))


def read_part(path: str | Path) -> PartFile:
    """Open a part through a memory map."""
    path = Path(path)
    batch = read_arrow(path)
    notes = json.loads(batch.schema.metadata[b"notes"])
    high, low = (numbers(batch.column(name)) for name in ("hash_high", "hash_low"))
    return PartFile(
        documents=shard_from_batch(batch, path),
        held_out=numbers(batch.column("held_out")).view(np.bool_),
        overlaps=numbers(batch.column("overlaps")).view(np.bool_),
        hashes=np.stack([high, low], axis=1),
        row=numbers(batch.column("row")),
        rows=json.loads(batch.schema.metadata[b"counts"])["rows"],
        quarantine=notes["quarantine"],
        tally=notes["tally"],
    )
