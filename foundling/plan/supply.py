"""Supply of tokens and disk: tokens there and needed, by source; shards; checkpoints."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundling.config.data import DataConfig, all_sources, phase_mixtures
from foundling.config.data_manifest import Manifest, shard_problem
from foundling.config.errors import ConfigError, DataError, UserError
from foundling.config.packing_spec import PackingSpec, packed_size
from foundling.config.run import RunConfig
from foundling.config.train import TrainConfig
from foundling.plan.horizon import Horizon, Sizes, SourceSize
from foundling.plan.memory import checkpoint_bytes
from foundling.plan.params import sizes_of
from foundling.plan.workload import kind_of
from foundling.runtime.console import table
from foundling.runtime.run_dir import COUNTS

# What saving costs: how long training stands still for a checkpoint, and how long it is written.
#
# Every rank copies and writes its own part, replicas share theirs, so both shrink with the ranks;
# the writing goes on in the background, from all ranks of a node to that node's disk or way to a
# store.

COPY_RATE = 53e9
"""Bytes a second from a GPU to locked memory: 14.9 GB in 0.28 s on an H200."""
WRITE_RATE = 0.75e9
"""Bytes a second of one node, hashed, written, forced to the disk and read back, on the same
machine: 14.9 GB in 17 to 23 s."""
AGREE_S = 0.02
"""The ranks agree before they begin."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """One save, and what all of them add."""

    checkpoint_bytes: int
    rank_bytes: int
    stall_s: float
    """Training stands still."""
    write_s: float
    """Behind the training."""
    share: float
    """Of the training time that the stalls add."""
    interval_s: float
    """Between two saves."""


def plan_saving(config: RunConfig, *, ranks: int, nodes: int, step_s: float) -> Saving:
    """What a save costs on so many ranks and nodes."""
    whole = checkpoint_bytes(config.model, kind_of(config.optim))
    stall = whole / ranks / COPY_RATE + (AGREE_S if ranks > 1 else 0.0)
    interval = config.checkpoint.every * step_s
    return Saving(
        checkpoint_bytes=whole,
        rank_bytes=-(-whole // ranks),
        stall_s=stall,
        write_s=whole / nodes / WRITE_RATE,
        share=stall / interval,
        interval_s=interval,
    )


# Whether the data is there as its manifests say: `plan` prints what `train` would refuse.
#
# Sizes and names only; hashes are `data verify`'s and the first step's. A plan warns where train
# refuses, because the data can still be repaired before the run.

TOKENIZER_FOLDER = "tokenizer"
QUICK_BYTES = 1 << 20
"""A larger tokenizer takes longer to read than a whole plan may: its fingerprint is train's."""
Fingerprint = Callable[[Path], str]
"""The fingerprint of a tokenizer's folder: given from above, because it is another room's."""


def data_problems(
    config: RunConfig, manifests: Mapping[str, Manifest], fingerprint: Fingerprint | None
) -> Iterator[UserError]:
    """What train will say about the data, an error each: of each source that is not whole the first
    shard, and how many more."""
    for name, manifest in manifests.items():
        if not (manifest.complete or config.data.follow):
            yield DataError(f"{name} is still being built; wait for its build, or set data.follow.")
    for name, manifest in manifests.items():
        problems = (shard_problem(Path(name), info) for info in (*manifest.train, *manifest.val))
        wrong = [sentence for sentence in problems if sentence]
        if wrong:
            more = f" ({len(wrong) - 1} more are not whole either)" if wrong[1:] else ""
            yield DataError(wrong[0].removesuffix(".") + more + ".")
    if manifests:
        yield from map(ConfigError, _tokenizer(config, manifests, fingerprint))


def _tokenizer(
    config: RunConfig, manifests: Mapping[str, Manifest], fingerprint: Fingerprint | None
) -> Iterator[str]:
    """Every source must have been built with the one tokenizer that train will load."""
    folder = Path(config.data.tokenizer or Path(next(iter(manifests))) / TOKENIZER_FOLDER)
    if not folder.exists():
        yield f"{folder} is missing, the tokenizer of the data; copy it back or build again."
        return
    wanted = next(iter(manifests.values())).tokenizer
    files = folder.iterdir() if folder.is_dir() else [folder]
    if fingerprint is not None and sum(file.stat().st_size for file in files) <= QUICK_BYTES:
        try:
            wanted = fingerprint(folder)
        except UserError as error:
            yield str(error)
            return
    for name, manifest in manifests.items():
        if manifest.tokenizer != wanted:
            yield (
                f"{name} was built with tokenizer {manifest.tokenizer[:12]} and {folder} is"
                f" {wanted[:12]}; build it again or set data.tokenizer."
            )


# Text against appetite, and disk: tokens there and needed, epochs, shards, checkpoints to keep.
#
# One account needed 178 shards, had 100, and trained on repeats without knowing it.

FINEWEB_SHARD_TOKENS = 56_000_000
"""GPT-2 tokens in a shard of karpathy/fineweb-edu-100b-shuffle (docs/accounts.md)."""


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


def plan_supply(
    config: RunConfig,
    horizon: Horizon | None,
    fingerprint: Fingerprint | None = None,
) -> Supply:
    """Read the manifests that are named, look for their shards, and add everything up."""
    checkpoint = checkpoint_bytes(config.model, kind_of(config.optim))
    manifests = {name: Manifest.load(Path(name)) for name in all_sources(config.data)}
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
        refusals=tuple(
            f"train will refuse: {problem}"
            for problem in data_problems(config, manifests, fingerprint)
        ),
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
        whole = [info for info in manifest.train if not shard_problem(Path(name), info)]
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
    manifests = {name: Manifest.load(Path(name)) for name in all_sources(config.data)}
    sizes = []
    for sources, spec in phase_mixtures(config.data, config.train.seq_len):
        sizes.append({name: _size(name, manifests[name], spec) for name in sources})
    needed = max(manifest.vocab_size for manifest in manifests.values())
    return with_vocabulary(config, needed), sizes


def with_vocabulary(config: RunConfig, needed: int) -> RunConfig:
    """The config with a vocabulary of its own or else the tokenizer's, which it must hold."""
    vocab = config.model.vocab_size or needed
    if vocab < needed:
        raise ConfigError(
            f"model.vocab_size is {vocab} and the tokenizer has {needed} tokens; raise it or leave"
            " it at 0."
        )
    return config.replace(model={"vocab_size": vocab})


def _size(name: str, manifest: Manifest, spec: PackingSpec) -> SourceSize:
    size, exact = packed_size(Path(name), manifest, spec)
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


def allowed_repeats(data: DataConfig, train: TrainConfig) -> float:
    """How often a source may be read; a horizon in epochs asks for as many."""
    return max(data.allow_repeat, train.horizon_in("epochs"))


ESTIMATE = 2.0
"""How far an estimated size of packed data is trusted before the ranks have counted."""


def check_supply(config: RunConfig, horizon: Horizon, sizes: Sizes) -> None:
    """Refuse a horizon that reads a source more often than is allowed. Where a size is estimated
    the ranks decide, unless it is off by a factor; a followed build grows."""
    if config.data.follow:
        return
    is_exact = all(size.is_exact for mix in sizes for size in mix.values())
    allowed = allowed_repeats(config.data, config.train)
    bound = allowed * (1 if is_exact else ESTIMATE)
    epochs = epochs_needed(horizon, sizes)
    check_enough_data({name: n for name, n in epochs.items() if n > bound}, allowed)


def check_enough_data(epochs: Mapping[str, float], allow_repeat: float) -> None:
    """Refuse to repeat data more than data.allow_repeat says."""
    for name, times in epochs.items():
        if times > allow_repeat * (1 + 1e-9):
            raise ConfigError(
                f"{name} would be read {times:.2f} times and data.allow_repeat is"
                f" {allow_repeat:g}; shorten the horizon, build more data, or raise"
                " data.allow_repeat."
            )


# What was read, as a table: by stage and source, with each source's achieved share.
#
# `train` prints it when a run ends and `runs show` for a model's whole life, so it stands below
# both.
TokensBySource = Mapping[str, float]
_HEAD = ["stage", "source", "units", "tokens", "targets", "epochs", "of units", "of tokens"]


def with_shares(sources: Mapping[str, TokensBySource]) -> dict[str, dict[str, float]]:
    """Each source's counts, and its shares of all units and tokens."""
    totals = {field: max(sum(c[field] for c in sources.values()), 1) for field in COUNTS}
    return {
        name: {
            **counts,
            "units_share": counts["units"] / totals["units"],
            "tokens_share": counts["tokens"] / totals["tokens"],
        }
        for name, counts in sources.items()
    }


def added_up(parts: Sequence[Mapping[str, TokensBySource]]) -> dict[str, float]:
    """All sources of all parts together."""
    return {
        field: sum(counts[field] for part in parts for counts in part.values()) for field in COUNTS
    }


def tokens_table(parts: Sequence[tuple[str, Mapping[str, TokensBySource]]]) -> list[str]:
    """(stage, counts by source) for each run of a life, as lines of text with a total."""
    rows = [_HEAD]
    for stage, sources in parts:
        shared = with_shares(sources)
        for name, counts in shared.items():
            shares = [f"{counts['units_share']:.2%}", f"{counts['tokens_share']:.2%}"]
            numbers = [*(f"{counts[field]:,}" for field in _HEAD[2:5]), f"{counts['epochs']:.3f}"]
            rows.append([stage, name, *numbers, *shares])
    total = added_up([sources for _, sources in parts])
    rows.append(["total", "", *(f"{total[field]:,}" for field in _HEAD[2:5]), "", "", ""])
    return [line.rstrip() for line in table(rows)]


def asked_for(data: DataConfig) -> list[str]:
    """The mixture as it was asked for, phase by phase."""
    return [
        f"asked for, by {data.weights_by}: {_weights(data.sources)}",
        *(
            f"from {f'{p.at:.0%} of the steps' if p.at < 1 else f'step {p.at:g}'} on:"
            f" {_weights(p.sources)}"
            for p in data.phases
            if p.sources
        ),
    ]


def _weights(sources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {weight:g}" for name, weight in sources.items())


def by_documents(epochs: Mapping[str, float], documents: Mapping[str, int]) -> list[str]:
    """What was read in documents: epochs times a source's own, because rows know no documents."""
    read = {name: passes * documents[name] for name, passes in epochs.items() if name in documents}
    total = sum(read.values())
    if not total:
        return []
    shares = (f"{name} about {n:,.0f} ({n / total:.2%})" for name, n in read.items())
    return [f"read, in documents: {', '.join(shares)}"]


def as_counts(ledger: Mapping[str, Any], epochs: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """A ledger's JSON with the epochs added to the counts."""
    return {name: {**counts, "epochs": epochs.get(name, 0.0)} for name, counts in ledger.items()}
