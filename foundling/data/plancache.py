"""Bestfit plans kept beside their shards, so that packing is computed once per data set.

The name carries the shard's checksum, the sequence length and the policy, and the file its own
checksum: a stale or damaged plan is computed again, never believed. Several ranks may write at
once; each writes the same bytes under its own temporary name. A folder that cannot be written to
costs time and nothing else.
"""

import hashlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa

from foundling.config.errors import DataError
from foundling.config.sections import Packing
from foundling.data.packing import BestfitPlan, Plan, pack
from foundling.data.shard import Shard, ragged, read_arrow, write_arrow

PLAN_VERSION = 1
"""Part of every name: raise it when the policy packs differently."""


def plan_for(shard: Shard, path: Path, sha256: str, seq_len: int, policy: Packing) -> Plan:
    """The rows of a shard, from the cache where it holds them."""
    lengths = np.diff(shard.offsets)
    if policy == "concat":
        return pack(lengths, seq_len, policy)
    file = path.with_name(f"{path.stem}.{policy}{PLAN_VERSION}-{seq_len}-{sha256[:16]}.plan")
    cached = _read(file, shard, seq_len)
    if cached is not None:
        return cached
    plan = pack(lengths, seq_len, policy)
    assert isinstance(plan, BestfitPlan)
    with suppress(OSError):
        _write(file, plan)
    return plan


def _checksum(plan: BestfitPlan) -> bytes:
    digest = hashlib.sha256(str(plan.seq_len).encode())
    for array in (plan.first, plan.starts, plan.lengths, plan.continues):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest().encode()


def _write(file: Path, plan: BestfitPlan) -> None:
    columns = {
        "starts": ragged(plan.first, plan.starts),
        "lengths": ragged(plan.first, plan.lengths),
        "continues": ragged(plan.first, plan.continues),
    }
    batch = pa.RecordBatch.from_pydict(columns)
    write_arrow(file, batch.replace_schema_metadata({"sha256": _checksum(plan)}))


def _read(file: Path, shard: Shard, seq_len: int) -> BestfitPlan | None:
    """The cached plan, or None when there is none that can be trusted."""
    if not file.is_file():
        return None
    try:
        batch = read_arrow(file)
        starts = batch.column("starts")
        plan = BestfitPlan(
            seq_len=seq_len,
            first=starts.offsets.to_numpy(),
            starts=starts.values.to_numpy(),
            lengths=batch.column("lengths").values.to_numpy(),
            continues=batch.column("continues").values.to_numpy(),
        )
        stated = (batch.schema.metadata or {}).get(b"sha256")
    except (DataError, KeyError, AttributeError, pa.ArrowException):
        return None
    whole = stated == _checksum(plan) and int(plan.lengths.sum()) == len(shard.tokens)
    return plan if whole else None
