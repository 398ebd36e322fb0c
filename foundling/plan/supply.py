"""Text against appetite, and disk: tokens there and needed, epochs, shards, checkpoints to keep.

One account needed 178 shards, had 100, and trained on repeats without knowing it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from foundling.config.cut import Cut
from foundling.config.errors import ConfigError
from foundling.config.manifest import Manifest
from foundling.config.packed import packed_size
from foundling.config.phases import every_source, mixes_of
from foundling.config.sections import RunConfig
from foundling.plan.horizon import Horizon, Sizes, SourceSize
from foundling.plan.memory import checkpoint_bytes
from foundling.plan.stock import Fingerprint, refusals, whole_shards
from foundling.plan.work import kind_of, sizes_of

FINEWEB_SHARD_TOKENS = 56_000_000
"""GPT-2 tokens in a shard of karpathy/fineweb-edu-100b-shuffle (account 003, docs/accounts.md)."""
FINEWEB_SHARDS = 1823


@dataclass(frozen=True, kw_only=True)
class Supply:
    """What the run reads and writes."""

    needed_tokens: int | None
    available_tokens: int | None
    """In the manifests of data.sources; None while none is named."""
    sources: dict[str, dict[str, float]]
    """By source: tokens needed and there, shards there, needed and listed."""
    refusals: tuple[str, ...]
    """What train will say about the data as it is."""
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


def plan_supply(
    config: RunConfig,
    horizon: Horizon | None,
    optimizer: str = "",
    fingerprint: Fingerprint | None = None,
) -> Supply:
    """Read the manifests that are named, look for their shards, and add everything up."""
    checkpoint = checkpoint_bytes(config.model, optimizer or kind_of(config.optim))
    manifests = {name: Manifest.load(Path(name)) for name in every_source(config.data)}
    width = 2 if config.model.vocab_size <= 65536 else 4
    needed = horizon.tokens if horizon else None
    stored = sum(s.file_bytes for m in manifests.values() for s in (*m.train, *m.val))
    data = stored or width * (needed or 0)
    shards = None
    if not manifests and needed is not None:
        shards = -(-needed // FINEWEB_SHARD_TOKENS)
    sources = _sources(horizon, manifests)
    return Supply(
        needed_tokens=needed,
        available_tokens=round(sum(s["tokens"] for s in sources.values())) if sources else None,
        sources=sources,
        refusals=tuple(refusals(config, manifests, fingerprint)),
        fineweb_shards=shards,
        data_bytes=data,
        checkpoint_bytes=checkpoint,
        weights_bytes=2 * sizes_of(config.model).all,
        disk_bytes=data + (config.checkpoint.keep + 1) * checkpoint,
    )


def _sources(
    horizon: Horizon | None, manifests: Mapping[str, Manifest]
) -> dict[str, dict[str, float]]:
    found = {}
    for name, manifest in manifests.items():
        listed = len(manifest.train)
        whole = whole_shards(name, manifest)
        there = sum(info.tokens for info in whole)
        row: dict[str, float] = {"tokens": there, "shards": len(whole), "shards_listed": listed}
        if horizon is not None:
            row["needed"] = round(
                sum(p.steps * p.tokens_per_step * p.weights.get(name, 0.0) for p in horizon.phases)
            )
            row["shards_needed"] = -(-row["needed"] * listed // max(manifest.train_tokens, 1))
        found[name] = row
    return found


def known_sizes(config: RunConfig) -> tuple[RunConfig, list[dict[str, SourceSize]] | None]:
    """What the manifests of data.sources say, without opening a shard; None if none is named.

    The vocabulary comes with them, where the config leaves it to the tokenizer.
    """
    if not config.data.sources:
        return config, None
    manifests = {name: Manifest.load(Path(name)) for name in every_source(config.data)}
    sizes = []
    for sources, cut in mixes_of(config.data, config.train.seq_len):
        sizes.append({name: _size(name, manifests[name], cut) for name in sources})
    needed = max(manifest.vocab_size for manifest in manifests.values())
    vocab = config.model.vocab_size or needed
    if vocab < needed:
        raise ConfigError(
            f"model.vocab_size is {vocab} and the data's tokenizer has {needed} tokens; raise it or"
            " leave it at 0."
        )
    return replace(config, model=replace(config.model, vocab_size=vocab)), sizes


def _size(name: str, manifest: Manifest, cut: Cut) -> SourceSize:
    size, exact = packed_size(Path(name), manifest, cut)
    return SourceSize(
        units=size.units,
        tokens=size.tokens,
        documents=size.documents,
        is_exact=exact and manifest.complete,
    )


def epochs_needed(horizon: Horizon, sizes: Sizes) -> dict[str, float]:
    """How often each source is read, over all phases."""
    total: dict[str, float] = {}
    for phase, size in zip(horizon.phases, sizes, strict=True):
        units = phase.steps * phase.rows_per_step
        for name, weight in phase.weights.items():
            total[name] = total.get(name, 0.0) + units * weight / size[name].units
    return total


def check_enough_data(epochs: Mapping[str, float], config: RunConfig) -> None:
    """Refuse to train on repeats that nobody asked for; a horizon in epochs asks for them."""
    allow_repeat = max(config.data.allow_repeat, config.train.epochs)
    for name, times in epochs.items():
        if times > allow_repeat * (1 + 1e-9):
            raise ConfigError(
                f"{name} would be read {times:.2f} times and data.allow_repeat is"
                f" {allow_repeat:g}; shorten the horizon, build more data, or raise"
                " data.allow_repeat."
            )
