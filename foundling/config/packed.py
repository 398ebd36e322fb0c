"""What an epoch of a source amounts to once it is cut: counted once by `data`, noted beside the
shards, and read by `plan`, which must not load Arrow.

A note is kept by the checksum of each shard, so it stays true of a data set that grows, and an open
of ten thousand shards reads one file instead of ten thousand plans.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from foundling.config.cut import PARTS, WHOLE, Cut
from foundling.config.manifest import Manifest, ShardInfo

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

    @property
    def padded_share(self) -> float:
        """Share of the positions that hold nothing."""
        return 1 - self.tokens / self.positions if self.positions else 0.0

    @property
    def cut_share(self) -> float:
        """Cuts per document."""
        return self.cuts / self.documents if self.documents else 0.0


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


def packed_size(folder: Path, manifest: Manifest, cut: Cut) -> tuple[PackedSize, bool]:
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


def read_note(folder: Path, cut: Cut) -> Note:
    """What was noted about the shards of a folder; empty where it is missing, old or damaged."""
    try:
        data = json.loads(_path(folder, cut).read_text())
        if data["schema"] != NOTE_SCHEMA or data["sha256"] != _checksum(data["shards"]):
            return {}
        return {key: PackedSize(*row) for key, row in data["shards"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def write_note(folder: Path, cut: Cut, note: Mapping[str, PackedSize]) -> None:
    """Leave a note; several ranks may write at once, each the same under its own temporary name."""
    path = _path(folder, cut)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    rows = {key: list(note[key].row) for key in sorted(note)}
    data = {"schema": NOTE_SCHEMA, "sha256": _checksum(rows), "shards": rows}
    temporary.write_text(json.dumps(data) + "\n")
    temporary.replace(path)


def _checksum(rows: Mapping[str, list[int]]) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _path(folder: Path, cut: Cut) -> Path:
    return folder / f"rows-{cut.label}.json"
