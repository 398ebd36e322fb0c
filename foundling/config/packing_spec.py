"""PackingSpec: how documents become rows, and how large an epoch is once they are packed."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from foundling.config.data_manifest import Manifest, ShardInfo
from foundling.config.errors import ConfigError

Packing = Literal["concat", "bestfit", "bucket", "pad"]


# How the documents of a source become units: everything that their number and content depend on.
#
# Plain numbers, because `plan` counts units with them and must not load Arrow.

PACKING_VERSION = 1
"""Part of the name of everything kept about a cut: raise it when a policy packs differently."""
PARTS = 65536
"""Documents are dealt by hash into this many parts, for phases that must not share any."""
WHOLE = (0, PARTS)


@dataclass(frozen=True, kw_only=True)
class PackingSpec:
    """One way to cut a source into units."""

    seq_len: int
    """Longest row, in input positions."""
    packing: Packing
    edges: tuple[int, ...] = ()
    """bucket only: row length of each bucket, rising; the last is seq_len."""
    unit_tokens: int = 0
    """bucket only: padded tokens of a unit, at most."""
    part: tuple[int, int] = WHOLE
    """Parts of the documents that are read: first, and one past the last."""

    @property
    def positions(self) -> int:
        """Input positions of a unit; of a bucket's, at most."""
        return self.unit_tokens if self.packing == "bucket" else self.seq_len

    @property
    def label(self) -> str:
        """A name for files that hold something about this cut."""
        words = [f"{self.packing}{PACKING_VERSION}", str(self.seq_len)]
        if self.packing == "bucket":
            edges = hashlib.sha256(repr(self.edges).encode()).hexdigest()[:12]
            words += [str(self.unit_tokens), edges]
        if self.part != WHOLE:
            words.append(f"p{self.part[0]}_{self.part[1]}")
        return "-".join(words)

    def units_per_step(self, global_batch_tokens: int) -> int:
        """Units of a step of so many padded tokens."""
        units, left = divmod(global_batch_tokens, self.positions)
        if left or not units:
            name = "data.bucket_tokens" if self.packing == "bucket" else "the rows' seq_len"
            raise ConfigError(
                f"train.global_batch_tokens {global_batch_tokens} is not a multiple of {name}"
                f" {self.positions}; change one of them."
            )
        return units

    def rows_in(self, edge: int) -> int:
        """Rows of a unit of the bucket with this edge."""
        return self.unit_tokens // edge


def bucket_edges(edges: Sequence[int], seq_len: int) -> tuple[int, ...]:
    """Edges below seq_len, and seq_len."""
    return (*(edge for edge in edges if edge < seq_len), seq_len)


# What an epoch of a source amounts to once it is cut: counted once by `data`, noted beside the
# shards, and read by `plan`, which must not load Arrow.
#
# A note is kept by the checksum of each shard, so it stays true of a data set that grows, and an
# open of ten thousand shards reads one file instead of ten thousand plans.

NOTE_SCHEMA = 2
NAME_DIGITS = 16
"""Hex digits of a shard's sha256 that name it in a note."""


@dataclass(frozen=True)
class PackedSize:
    """One epoch of some shards under one cut."""

    units: int = 0
    """Packed rows, or a bucket's micro-batches."""
    positions: int = 0
    """Input positions, padding included."""
    tokens: int = 0
    """Real input positions."""
    documents: int = 0
    cuts: int = 0
    """Places where a document was cut; concat of a whole source does not count them."""

    @property
    def row(self) -> tuple[int, ...]:
        """The five numbers, as a note keeps them."""
        return (self.units, self.positions, self.tokens, self.documents, self.cuts)


def stored_in(manifest: Manifest) -> PackedSize:
    """Tokens and documents of the train split, before any packing."""
    shards = manifest.train
    return PackedSize(
        tokens=sum(shard.tokens for shard in shards),
        documents=sum(shard.documents for shard in shards),
    )


Note = dict[str, PackedSize]
"""By shard."""


def shard_key(info: ShardInfo) -> str:
    """The name of a shard in a note."""
    return info.sha256[:NAME_DIGITS]


def stream_size(info: ShardInfo, seq_len: int) -> PackedSize:
    """concat of a whole shard needs no file: it is counted from the manifest alone."""
    rows = -(-info.tokens // seq_len)
    return PackedSize(rows, rows * seq_len, info.tokens, info.documents)


def packed_size(folder: Path, manifest: Manifest, cut: PackingSpec) -> tuple[PackedSize, bool]:
    """An epoch of the train split without opening a shard, and whether that is exact: it is for
    concat and for a cut that was computed before; otherwise it is as if nothing were padded."""
    if cut.packing == "concat" and cut.part == WHOLE:
        return total_size([stream_size(info, cut.seq_len) for info in manifest.train]), True
    note = read_note(folder, cut)
    found = [note.get(shard_key(info)) for info in manifest.train]
    known = [size for size in found if size is not None]
    if len(known) == len(found):
        return total_size(known), True
    share = (cut.part[1] - cut.part[0]) / PARTS
    guesses = []
    for info in manifest.train:
        tokens, documents = round(info.tokens * share), round(info.documents * share)
        units = -(-tokens // cut.positions)
        if cut.packing == "pad":  # a row each, and a row more for every full one
            units = max(units, documents)
        guesses.append(PackedSize(units, units * cut.positions, tokens, documents))
    return total_size(guesses), False


def total_size(sizes: Sequence[PackedSize]) -> PackedSize:
    """Several shards together."""
    return PackedSize(*map(sum, zip(*(size.row for size in sizes), strict=True)))


def read_note(folder: Path, cut: PackingSpec) -> Note:
    """What was noted about the shards of a folder; empty where it is missing, old or damaged."""
    try:
        data = json.loads(_path(folder, cut).read_text())
        if data["schema"] != NOTE_SCHEMA or data["sha256"] != _checksum(data["shards"]):
            return {}
        return {key: PackedSize(*row) for key, row in data["shards"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def write_note(folder: Path, cut: PackingSpec, note: Mapping[str, PackedSize]) -> None:
    """Leave a note; several ranks may write at once, each the same under its own temporary name."""
    path = _path(folder, cut)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    rows = {key: list(note[key].row) for key in sorted(note)}
    data = {"schema": NOTE_SCHEMA, "sha256": _checksum(rows), "shards": rows}
    temporary.write_text(json.dumps(data) + "\n")
    temporary.replace(path)


def _checksum(rows: Mapping[str, list[int]]) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _path(folder: Path, cut: PackingSpec) -> Path:
    return folder / f"rows-{cut.label}.json"
