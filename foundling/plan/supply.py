"""Text against appetite, and disk: tokens there and needed, shards to fetch, checkpoints to keep.

One account needed 178 shards, had 100, and trained on repeats without knowing it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foundling.config.manifest import Manifest
from foundling.config.sections import RunConfig
from foundling.plan.horizon import Horizon
from foundling.plan.memory import optimizer_bytes
from foundling.plan.work import sizes_of

FINEWEB_SHARD_TOKENS = 56_000_000
"""GPT-2 tokens in a shard of karpathy/fineweb-edu-100b-shuffle (FACTS, account 003)."""
FINEWEB_SHARDS = 1823


@dataclass(frozen=True, kw_only=True)
class Supply:
    """What the run reads and writes."""

    needed_tokens: int | None
    available_tokens: int | None
    """In the manifests of data.sources; None while none is named."""
    sources: dict[str, dict[str, float]]
    """By source: tokens needed and there, shards there, shards needed."""
    fineweb_shards: int | None
    """Shards of fineweb-edu-100b-shuffle that would be enough, where no source is named."""
    data_bytes: int
    checkpoint_bytes: int
    """Weights and the optimizer's state, as saved."""
    weights_bytes: int
    """An export in bf16."""
    disk_bytes: int
    """Data, the checkpoints that are kept and the one being written."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan_supply(config: RunConfig, horizon: Horizon | None, optimizer: str = "adamw") -> Supply:
    """Read the manifests that are named and add everything up."""
    sizes = sizes_of(config.model)
    checkpoint = 4 * sizes.all + optimizer_bytes(optimizer, sizes)
    manifests = {name: Manifest.load(Path(name)) for name in config.data.sources}
    width = 2 if config.model.vocab_size <= 65536 else 4
    needed = horizon.tokens if horizon else None
    stored = sum(s.file_bytes for m in manifests.values() for s in (*m.train, *m.val))
    data = stored or width * (needed or 0)
    shards = None
    if not manifests and needed is not None:
        shards = -(-needed // FINEWEB_SHARD_TOKENS)
    return Supply(
        needed_tokens=needed,
        available_tokens=sum(m.train_tokens for m in manifests.values()) if manifests else None,
        sources=_sources(config, horizon, manifests),
        fineweb_shards=shards,
        data_bytes=data,
        checkpoint_bytes=checkpoint,
        weights_bytes=2 * sizes.all,
        disk_bytes=data + (config.checkpoint.keep + 1) * checkpoint,
    )


def _sources(
    config: RunConfig, horizon: Horizon | None, manifests: Mapping[str, Manifest]
) -> dict[str, dict[str, float]]:
    total = sum(config.data.sources.values())
    found = {}
    for name, manifest in manifests.items():
        there, shards = manifest.train_tokens, len(manifest.train)
        row: dict[str, float] = {"tokens": there, "shards": shards}
        if horizon is not None:
            row["needed"] = round(horizon.tokens * config.data.sources[name] / total)
            row["shards_needed"] = -(-row["needed"] * shards // max(there, 1))
        found[name] = row
    return found
