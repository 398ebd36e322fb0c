"""What a device was measured to reach, kept as JSON so that later plans need neither it nor torch.

One file per device name in $FOUNDLING_HOME/devices, or ~/.cache/foundling/devices: a second
measurement replaces the first. `train/ceilings.py` measures, `plan` reads. Rejected: a file beside
the run, because ceilings belong to the machine and are wanted before there is a run.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from foundling.runtime.files import cache_folder, write_text_atomic

CEILINGS_SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class MatmulRate:
    """A product [m, k] x [k, n] and how fast it ran."""

    dtype: str
    m: int
    k: int
    n: int
    flops_per_s: float
    """2 m k n over the seconds of one product."""


@dataclass(frozen=True, kw_only=True)
class AttentionRate:
    """Causal grouped-query attention and how long it took."""

    dtype: str
    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    forward_s: float
    backward_s: float
    flops_per_s: float
    """Forward and backward, 7 batch heads seq^2 head_dim over the seconds: two products forward and
    five backward (one is made again), each 2 batch heads seq^2 head_dim, halved by the mask."""


@dataclass(frozen=True, kw_only=True)
class LossRate:
    """The fused head loss with its gradients."""

    dtype: str
    rows: int
    dim: int
    vocab: int
    seconds: float
    flops_per_s: float
    """6 rows dim vocab over the seconds."""


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Everything measured about one device."""

    device: str
    """The name that torch or the operating system gives it."""
    kind: str
    """cuda or cpu."""
    torch: str
    date: str
    """ISO 8601, UTC."""
    threads: int
    """CPU threads that torch used."""
    memory_bytes: int
    """Of the device, as torch reports it."""
    context_bytes: int
    """Taken by the driver and the libraries beside torch's own allocations."""
    matmul: tuple[MatmulRate, ...]
    attention: tuple[AttentionRate, ...]
    loss: tuple[LossRate, ...]
    copy_bytes_per_s: float
    """Read and written, by a large copy."""
    norm_bytes_per_s: float
    """Needed by RMSNorm forward and backward (read 3, written 2 tensors), over its time."""
    optimizer_bytes_per_s: float
    """28 bytes a parameter (read weight, gradient, moments; write all but the gradient)."""
    launch_s: float
    """From one tiny operation to the next, when nothing waits."""
    blocks: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Python's seconds for one block, forward and backward, by how it is run: eager, per-op."""
    allocator: Mapping[str, int] = field(default_factory=dict)
    """block_bytes: sizes are rounded up to it; small_segment_bytes, large_segment_bytes: what is
    asked of the driver at a time (empty where torch has no allocator of its own)."""

    def matmul_peak(self, dtype: str) -> float:
        """The best rate of any shape in FLOP/s; 0 where the dtype was not measured."""
        return max((rate.flops_per_s for rate in self.matmul if rate.dtype == dtype), default=0.0)

    def to_json(self) -> dict[str, Any]:
        return {"schema": CEILINGS_SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> "Ceilings":
        old: dict[str, Any] = {"blocks": {}}  # a file without it is an older one
        values = {item.name: {**old, **tree}[item.name] for item in fields(cls)}
        values["blocks"] = {name: tuple(pair) for name, pair in values["blocks"].items()}
        for name, kind in (("matmul", MatmulRate), ("attention", AttentionRate)):
            values[name] = tuple(kind(**row) for row in values[name])
        values["loss"] = tuple(LossRate(**row) for row in values["loss"])
        return cls(**values)


def devices_folder() -> Path:
    """Where measured devices are kept."""
    return cache_folder("devices")


def device_slug(name: str) -> str:
    """A device's name as a file name: `NVIDIA H100 80GB HBM3` is nvidia-h100-80gb-hbm3."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "device"


def save_ceilings(ceilings: Ceilings) -> Path:
    """Write the device's file, whole or not at all; returns its path."""
    path = devices_folder() / f"{device_slug(ceilings.device)}.json"
    write_text_atomic(path, json.dumps(ceilings.to_json(), indent=1) + "\n")
    return path


def load_ceilings(path: Path) -> Ceilings | None:
    """What a file holds; None where it is missing, damaged or of another version: a plan must not
    fail because of a cache, and `--probe` writes it anew."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        return Ceilings.from_json(tree) if tree["schema"] == CEILINGS_SCHEMA else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def known_ceilings() -> dict[str, Ceilings]:
    """Every measured device, by slug."""
    found = {path.stem: load_ceilings(path) for path in sorted(devices_folder().glob("*.json"))}
    return {slug: ceilings for slug, ceilings in found.items() if ceilings is not None}
