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
"""Part of the name of every file about a packing: raise it when a policy packs differently."""
PART_COUNT = 65536
"""Documents are dealt by hash into this many parts, for phases that must not share any."""
ALL_PARTS = (0, PART_COUNT)


@dataclass(frozen=True, kw_only=True)
class PackingSpec:
    """How the documents of a source become units (rows or micro-batches)."""

    seq_len: int
    """Longest row, in input positions."""
    packing: Packing
    edges: tuple[int, ...] = ()
    """bucket only: row length of each bucket, rising; the last is seq_len."""
    unit_tokens: int = 0
    """bucket only: padded tokens of a unit, at most."""
    part: tuple[int, int] = ALL_PARTS
    """Parts of the documents that are read: first, and one past the last."""

    @property
    def positions(self) -> int:
        """Input positions of a unit; of a bucket's, at most."""
        return self.unit_tokens if self.packing == "bucket" else self.seq_len

    @property
    def label(self) -> str:
        """A name for files that hold something about this packing."""
        words = [f"{self.packing}{PACKING_VERSION}", str(self.seq_len)]
        if self.packing == "bucket":
            edges = hashlib.sha256(repr(self.edges).encode()).hexdigest()[:12]
            words += [str(self.unit_tokens), edges]
        if self.part != ALL_PARTS:
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


# What an epoch of a source amounts to once it is packed: counted once by `data`, cached with the
# shards, and read by `plan`, which must not load Arrow.
#
# Sizes are cached by the checksum of each shard, so they stay true of a data set that grows, and an
# open of ten thousand shards reads one file instead of ten thousand plans.

CACHE_SCHEMA = 2
NAME_DIGITS = 16
"""Hex digits of a shard's sha256 that name it in the cache file."""


@dataclass(frozen=True)
class PackedSize:
    """One epoch of some shards in one packing."""

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
    def as_tuple(self) -> tuple[int, ...]:
        """The five numbers, as the cache file keeps them."""
        return (self.units, self.positions, self.tokens, self.documents, self.cuts)


def unpacked_size(manifest: Manifest) -> PackedSize:
    """Tokens and documents of the train split, before any packing."""
    shards = manifest.train
    return PackedSize(
        tokens=sum(shard.tokens for shard in shards),
        documents=sum(shard.documents for shard in shards),
    )


PackedSizeCache = dict[str, PackedSize]
"""By shard."""


def shard_key(info: ShardInfo) -> str:
    """The name of a shard in the cache file."""
    return info.sha256[:NAME_DIGITS]


def concat_size(info: ShardInfo, seq_len: int) -> PackedSize:
    """concat of a whole shard needs no file: it is counted from the manifest alone."""
    rows = -(-info.tokens // seq_len)
    return PackedSize(rows, rows * seq_len, info.tokens, info.documents)


def packed_size(folder: Path, manifest: Manifest, spec: PackingSpec) -> tuple[PackedSize, bool]:
    """An epoch of the train split without opening a shard, and whether that is exact: it is for
    concat and for a packing that was computed before; otherwise padding is not counted."""
    if spec.packing == "concat" and spec.part == ALL_PARTS:
        return total_size([concat_size(info, spec.seq_len) for info in manifest.train]), True
    cache = read_size_cache(folder, spec)
    found = [cache.get(shard_key(info)) for info in manifest.train]
    known = [size for size in found if size is not None]
    if len(known) == len(found):
        return total_size(known), True
    share = (spec.part[1] - spec.part[0]) / PART_COUNT
    guesses = []
    for info in manifest.train:
        tokens, documents = round(info.tokens * share), round(info.documents * share)
        units = -(-tokens // spec.positions)
        if spec.packing == "pad":  # a row each, and a row more for every full one
            units = max(units, documents)
        guesses.append(PackedSize(units, units * spec.positions, tokens, documents))
    return total_size(guesses), False


def total_size(sizes: Sequence[PackedSize]) -> PackedSize:
    """Several shards together."""
    return PackedSize(*map(sum, zip(*(size.as_tuple for size in sizes), strict=True)))


def read_size_cache(folder: Path, spec: PackingSpec) -> PackedSizeCache:
    """The cached sizes of a folder's shards; empty where the file is missing, old or damaged."""
    try:
        data = json.loads(_path(folder, spec).read_text())
        if data["schema"] != CACHE_SCHEMA or data["sha256"] != _checksum(data["shards"]):
            return {}
        return {key: PackedSize(*row) for key, row in data["shards"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def write_size_cache(folder: Path, spec: PackingSpec, cache: Mapping[str, PackedSize]) -> None:
    """Write the cache file; several ranks may do so at once, each under its own temporary name."""
    path = _path(folder, spec)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    rows = {key: list(cache[key].as_tuple) for key in sorted(cache)}
    data = {"schema": CACHE_SCHEMA, "sha256": _checksum(rows), "shards": rows}
    temporary.write_text(json.dumps(data) + "\n")
    temporary.replace(path)


def _checksum(rows: Mapping[str, list[int]]) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _path(folder: Path, spec: PackingSpec) -> Path:
    return folder / f"rows-{spec.label}.json"
