"""Plans kept beside their shards, so that packing is computed once per data set.

The name carries the shard's checksum and the cut, and the file its own checksum: a stale or damaged
plan is computed again, never believed. Several ranks may write at once; each writes the same bytes
under its own temporary name. A folder that cannot be written to costs time and nothing else.
"""

import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foundling.config.cut import PARTS, WHOLE, Cut
from foundling.config.errors import DataError
from foundling.data.keyed import scattered
from foundling.data.packing import PiecePlan, Plan, StreamPlan, is_stream, pack_pieces, units_of
from foundling.data.shard import Shard, numbers, ragged, read_arrow, write_arrow

_trusted: set[tuple[Path, int, int]] = set()
"""Plan files whose checksum was right when this process first read them (with size and time)."""


def plan_for(shard: Shard, path: Path, sha256: str, cut: Cut) -> Plan:
    """The units of a shard, from the cache where it holds them."""
    if is_stream(cut):
        return StreamPlan(len(shard.tokens), cut.seq_len)
    file = path.with_name(f"{path.stem}.{cut.label}-{sha256[:16]}.plan")
    owner = f"{cut.label} {sha256}"
    cached = _read(file, cut, owner)
    if cached is not None:
        return units_of(cached, cut)
    pieces = pack_pieces(shard.offsets, cut, chosen(sha256, len(shard), cut))
    with suppress(OSError):
        _write(file, pieces, owner)
    return units_of(pieces, cut)


def chosen(sha256: str, documents: int, cut: Cut) -> NDArray[np.bool_] | None:
    """Which documents of a shard the cut's part holds; None means all.

    The hash is of the shard's checksum and the document's place in it, so a document stays in its
    part however the data set grows, and nothing has to be read.
    """
    if cut.part == WHOLE:
        return None
    bits = PARTS.bit_length() - 1
    part = scattered(np.arange(documents), f"part of {sha256}") >> np.uint64(64 - bits)
    return (part >= cut.part[0]) & (part < cut.part[1])


def _checksum(plan: PiecePlan, owner: str) -> bytes:
    # Against damage, not against malice; and it is in the way of every first read of a plan, where
    # it costs a third of a sha256.
    found = zlib.crc32(owner.encode())
    for array in (plan.first, plan.starts, plan.lengths, plan.continues):
        found = zlib.crc32(np.ascontiguousarray(array).data, found)
    return str(found).encode()


def _write(file: Path, plan: PiecePlan, owner: str) -> None:
    columns = {
        "starts": ragged(plan.first, plan.starts),
        "lengths": ragged(plan.first, plan.lengths),
        "continues": ragged(plan.first, plan.continues),
    }
    batch = pa.RecordBatch.from_pydict(columns)
    write_arrow(file, batch.replace_schema_metadata({"crc32": _checksum(plan, owner)}))


def _read(file: Path, cut: Cut, owner: str) -> PiecePlan | None:
    """The cached plan, or None when there is none that can be trusted."""
    try:
        found = file.stat()
        batch = read_arrow(file)
        starts = batch.column("starts")
        plan = PiecePlan(
            seq_len=cut.seq_len,
            first=numbers(starts.offsets),
            starts=numbers(starts.values),
            lengths=numbers(batch.column("lengths").values),
            continues=numbers(batch.column("continues").values),
        )
        stated = (batch.schema.metadata or {}).get(b"crc32")
    except (OSError, DataError, KeyError, AttributeError, pa.ArrowException):
        return None
    identity = (file, found.st_size, found.st_mtime_ns)
    if identity not in _trusted:
        if stated != _checksum(plan, owner):
            return None
        _trusted.add(identity)
    return plan
