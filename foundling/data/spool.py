"""Part files: what phase 1 of a build leaves on disk, each whole or absent.

A part is a run of rows of one piece: its documents with their tokens, and beside each document what
the later phases ask about it (held out, hash of its content, overlap with an evaluation set, number
of its row). What a part holds depends on its rows alone, so any worker may write it, twice if need
be. The ends of parts leave no trace in the data set.
"""

import json
from dataclasses import dataclass, field
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
class Part:
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
    """Unusable rows: number within the part, source, where, reason, excerpt."""
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


def write_part(path: Path, part: Part) -> PartInfo:
    """Write a part, whole or not at all."""
    counts = {
        "documents": len(part.documents),
        "tokens": len(part.documents.tokens),
        "train_tokens": part.train_tokens,
        "rows": part.rows,
        "bad": len(part.quarantine),
        "text_bytes": int(part.documents.text_bytes.sum()),
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
    metadata = {"counts": json.dumps(counts), "notes": json.dumps(notes)}
    write_arrow(path, batch.replace_schema_metadata(metadata), hashed=False)
    return PartInfo(path=str(path), **counts)


def read_info(path: Path) -> PartInfo | None:
    """The numbers of a part that an earlier start left; None if it cannot be read."""
    try:
        return PartInfo(path=str(path), **json.loads(read_arrow(path).schema.metadata[b"counts"]))
    except (DataError, KeyError, TypeError, ValueError):
        return None


def read_part(path: str | Path) -> Part:
    """Open a part through a memory map."""
    path = Path(path)
    batch = read_arrow(path)
    notes = json.loads(batch.schema.metadata[b"notes"])
    high, low = (numbers(batch.column(name)) for name in ("hash_high", "hash_low"))
    return Part(
        documents=shard_from_batch(batch, path),
        held_out=numbers(batch.column("held_out")).view(np.bool_),
        overlaps=numbers(batch.column("overlaps")).view(np.bool_),
        hashes=np.stack([high, low], axis=1),
        row=numbers(batch.column("row")),
        rows=json.loads(batch.schema.metadata[b"counts"])["rows"],
        quarantine=notes["quarantine"],
        tally=notes["tally"],
    )
