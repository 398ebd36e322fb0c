"""The first half of a build: rows are encoded, part by part, into files that are whole or absent.

A part is a run of rows, decided by the rows alone, and carries their digest; a restarted build
keeps the parts whose rows have not changed and encodes only the rest. Rejected: keeping everything
in memory until the shuffle (memory grows with the data, and a kill loses it all).
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foundling.data.rows import Row, excerpt, is_held_out, text_bytes, unusable
from foundling.data.shard import (
    Shard,
    read_arrow,
    shard_from_batch,
    shard_to_batch,
    write_arrow,
)
from foundling.tokenizer import Tokenizer

PART_ROWS = 16384
PART_CHARS = 8_000_000
"""A part ends at whichever of the two comes first."""


@dataclass(frozen=True)
class Part:
    """Encoded rows on disk."""

    documents: Shard
    held_out: NDArray[np.bool_]
    """Which of the documents belong to val."""
    rows: int
    quarantine: list[dict[str, Any]]
    digest: str = ""
    """Of the rows it was made from."""

    @property
    def train_tokens(self) -> int:
        """Tokens of the documents for training."""
        return int(np.diff(self.documents.offsets)[~self.held_out].sum())


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Everything that decides what a row becomes."""

    tokenizer: Tokenizer
    chat: bool
    val_share: float
    dtype: type[np.uint16] | type[np.uint32]


def spool(
    rows: Iterable[Row],
    encoder: Encoder,
    folder: Path,
    *,
    max_tokens: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Encode rows into part files until they, or `max_tokens` for training, run out."""
    paths: list[Path] = []
    rows_seen, tokens_seen = 0, 0
    # A small budget needs no large part: eight characters a token are more than any text has.
    chars = PART_CHARS if max_tokens is None else min(PART_CHARS, 8 * max_tokens)
    for number, chunk in enumerate(chunks(rows, chars)):
        path = folder / f"part-{number:06d}.arrow"
        digest = _digest(chunk, rows_seen)
        part = read_part(path) if path.is_file() else None
        if part is None or part.digest != digest:
            left = None if max_tokens is None else max_tokens - tokens_seen
            part = encode_rows(chunk, encoder, rows_seen, left)
            _write_part(path, part, digest)
        paths.append(path)
        rows_seen += part.rows
        tokens_seen += part.train_tokens
        if progress is not None:
            progress(rows_seen, tokens_seen)
        if max_tokens is not None and tokens_seen >= max_tokens:
            break
    return paths


def chunks(rows: Iterable[Row], part_chars: int) -> Iterator[list[Row]]:
    """Rows in runs whose ends depend on nothing but the rows."""
    chunk: list[Row] = []
    chars = 0
    for row in rows:
        chunk.append(row)
        chars += len(row.text) if isinstance(row.text, str) else 200
        if len(chunk) >= PART_ROWS or chars >= part_chars:
            yield chunk
            chunk, chars = [], 0
    if chunk:
        yield chunk


def encode_rows(
    rows: list[Row], encoder: Encoder, first_row: int = 0, max_tokens: int | None = None
) -> Part:
    """Encode what can be encoded and note the rest; stop after `max_tokens` for training."""
    reasons = [unusable(row, encoder.chat) for row in rows]
    good = [row for row, reason in zip(rows, reasons, strict=True) if reason is None]
    places = [place for place, reason in enumerate(reasons) if reason is None]
    ids, masks = _encode(good, encoder)
    held_out = np.array([is_held_out(row, encoder.val_share) for row in good], np.bool_)
    lengths = np.array([len(document) for document in ids], np.int64)
    kept, used = len(good), len(rows)
    if max_tokens is not None:
        reached = np.cumsum(np.where(held_out, 0, lengths)).searchsorted(max_tokens)
        if reached < len(good):
            kept, used = int(reached) + 1, places[int(reached)] + 1
    quarantine = [
        {
            "row": first_row + place,
            "source": row.source,
            "where": row.where,
            "reason": reason,
            "excerpt": excerpt(row),
        }
        for place, (row, reason) in enumerate(zip(rows[:used], reasons, strict=False))
        if reason is not None
    ]
    documents = _documents(good[:kept], ids[:kept], masks, lengths[:kept], encoder)
    return Part(documents, held_out[:kept], used, quarantine)


def _encode(rows: list[Row], encoder: Encoder) -> tuple[list[list[int]], list[list[bool]] | None]:
    tokenizer = encoder.tokenizer
    if encoder.chat:
        rendered = tokenizer.render_batch([row.messages or () for row in rows])
        return [chat.ids for chat in rendered], [chat.mask for chat in rendered]
    texts = tokenizer.encode_batch([row.text or "" for row in rows])
    return [[tokenizer.bos_id, *text, tokenizer.eos_id] for text in texts], None


def _documents(
    rows: list[Row],
    ids: list[list[int]],
    masks: list[list[bool]] | None,
    lengths: NDArray[np.int64],
    encoder: Encoder,
) -> Shard:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens: NDArray[Any] = np.empty(int(offsets[-1]), encoder.dtype)
    mask = None if masks is None else np.empty(len(tokens), np.uint8)
    for number, (start, stop) in enumerate(pairwise(offsets.tolist())):
        tokens[start:stop] = ids[number]
        if mask is not None and masks is not None:
            mask[start:stop] = masks[number]
    names = tuple(sorted({row.kind for row in rows}))
    codes = {name: code for code, name in enumerate(names)}
    floors = [np.nan if row.floor_bits is None else row.floor_bits for row in rows]
    return Shard(
        offsets=offsets,
        tokens=tokens,
        mask=mask,
        text_bytes=np.array([text_bytes(row) for row in rows], np.int64),
        kind_codes=np.array([codes[row.kind] for row in rows], np.int32),
        kind_names=names,
        floor_bits=np.array(floors, np.float64),
    )


def _digest(rows: list[Row], first_row: int) -> str:
    """What the rows were, so that a part is never taken for the part of other rows."""
    state = hashlib.blake2b(str(first_row).encode(), digest_size=16)
    for row in rows:
        state.update(repr(row).encode("utf-8", "surrogatepass"))
    return state.hexdigest()


def _write_part(path: Path, part: Part, digest: str) -> None:
    batch = shard_to_batch(part.documents)
    batch = batch.append_column("held_out", pa.array(part.held_out))
    notes = json.dumps({"rows": part.rows, "quarantine": part.quarantine, "digest": digest})
    write_arrow(path, batch.replace_schema_metadata({"part": notes}))


def read_part(path: Path) -> Part:
    """Open a part through a memory map."""
    batch = read_arrow(path)
    notes = json.loads(batch.schema.metadata[b"part"])
    held_out = batch.column("held_out").to_numpy(zero_copy_only=False)
    documents = shard_from_batch(batch, path)
    return Part(documents, held_out, notes["rows"], notes["quarantine"], notes["digest"])
