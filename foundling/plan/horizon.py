"""How long a run is: one horizon in, steps and tokens out, with every factor of a step named.

`train` and `plan` both call this, so the forecast and the run cannot disagree.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from foundling.config.checks import HORIZONS, horizons
from foundling.config.errors import ConfigError
from foundling.config.manifest import Manifest, packed_rows
from foundling.config.sections import OptimConfig, RunConfig
from foundling.plan.params import count_params


@dataclass(frozen=True, kw_only=True)
class SourceSize:
    """What one epoch of a source amounts to once it is packed."""

    units: int
    """Packed rows."""
    tokens: int
    """Real input positions, padding left out."""
    is_exact: bool = True
    """False while the rows are guessed: only `data` can pack."""


@dataclass(frozen=True, kw_only=True)
class Horizon:
    """The length of a run and the make-up of one step."""

    steps: int
    tokens: int
    """Real tokens expected over the run."""
    tokens_per_step: float
    """Real tokens expected per step; padding makes it less than positions_per_step."""
    positions_per_step: int
    rows_per_step: int
    data_ranks: int
    accumulation: int
    """Micro-steps per step and process."""
    warmup_steps: int
    basis: str
    """The horizon in words."""
    is_exact: bool = True
    """False when steps rest on a guess of how rows will be packed."""


@dataclass(frozen=True)
class Pace:
    """How fast and how dear a step is, for a horizon in hours or dollars."""

    step_s: float
    dollars_per_hour: float | None
    where: str
    """The machines in words."""


def plan_horizon(
    config: RunConfig,
    data_ranks: int,
    sizes: Mapping[str, SourceSize] | None = None,
    pace: Pace | None = None,
) -> Horizon:
    """Work out the run's length; without `sizes` every row is taken to be full."""
    train = config.train
    rows = rows_per_step(config, data_ranks)
    share = _non_padding_share(config, sizes)
    tokens_per_step = rows * train.seq_len * share
    if train.hours or train.dollars:
        steps, basis = _steps_in_time(config, pace)
    else:
        steps, basis = _steps(config, tokens_per_step, sizes)
    if config.optim.warmup_steps > steps:
        raise ConfigError(
            f"optim.warmup_steps is {config.optim.warmup_steps} and the run has {steps} steps;"
            " shorten the warm-up."
        )
    return Horizon(
        steps=steps,
        tokens=round(steps * tokens_per_step),
        tokens_per_step=tokens_per_step,
        positions_per_step=rows * train.seq_len,
        rows_per_step=rows,
        data_ranks=data_ranks,
        accumulation=math.ceil(math.ceil(rows / data_ranks) / train.batch_size),
        warmup_steps=warmup_steps(config.optim, steps),
        basis=basis,
        is_exact=all(size.is_exact for size in (sizes or {}).values()),
    )


def rows_per_step(config: RunConfig, data_ranks: int) -> int:
    """Rows of a global batch, from the tokens asked for or from the processes there are."""
    train = config.train
    if train.global_batch_tokens:
        return train.global_batch_tokens // train.seq_len
    return train.batch_size * data_ranks


def warmup_steps(optim: OptimConfig, steps: int) -> int:
    """Warm-up in steps, from the number or the share of all steps; never more than there are."""
    return min(optim.warmup_steps or round(optim.warmup_share * steps), steps)


def _non_padding_share(config: RunConfig, sizes: Mapping[str, SourceSize] | None) -> float:
    if not sizes:
        return 1.0
    weights = config.data.sources
    total = sum(weights.values())
    per_unit = sum(weights[name] / total * size.tokens / size.units for name, size in sizes.items())
    return per_unit / config.train.seq_len


def _steps(
    config: RunConfig, tokens_per_step: float, sizes: Mapping[str, SourceSize] | None
) -> tuple[int, str]:
    train = config.train
    given = horizons(train)
    if not given:
        wanted = ", ".join("train." + name for name in HORIZONS)
        raise ConfigError(f"the run has no horizon; give one of {wanted}.")
    params = count_params(config.model).of(train.param_count)
    if train.steps:
        return train.steps, f"{train.steps:,} steps"
    if train.epochs:
        if not sizes:
            raise ConfigError("train.epochs needs data.sources that are built; build them first.")
        tokens = train.epochs * sum(size.tokens for size in sizes.values())
        # Down, not up: an epoch is a promise that nothing is read twice.
        return max(1, math.floor(tokens / tokens_per_step)), f"{train.epochs:g} epochs"
    if train.flops:
        tokens = train.flops / (6 * params)
        basis = f"{train.flops:g} FLOP at 6 x {params:,} ({train.param_count}) a token"
    elif train.tokens_per_param:
        tokens = train.tokens_per_param * params
        basis = f"{train.tokens_per_param:g} tokens per parameter ({train.param_count}: {params:,})"
    else:
        tokens = float(train.tokens)
        basis = f"{train.tokens:,} tokens"
    return math.ceil(tokens / tokens_per_step), basis


def _steps_in_time(config: RunConfig, pace: Pace | None) -> tuple[int, str]:
    """Steps that hours or dollars pay for; down, because neither may be exceeded."""
    train = config.train
    asked = f"{train.hours:g} hours" if train.hours else f"${train.dollars:,g}"
    if pace is None:
        raise ConfigError(f"a horizon of {asked} needs hardware to be planned on; give --gpu NAME.")
    hours = train.hours
    if train.dollars:
        if pace.dollars_per_hour is None:
            raise ConfigError(f"{pace.where} has no price, so {asked} buy no steps; give --price.")
        hours = train.dollars / pace.dollars_per_hour
    steps = math.floor(hours * 3600 / pace.step_s)
    if steps < 1:
        raise ConfigError(f"{asked} on {pace.where} are less than one step; give more.")
    return steps, f"{asked} on {pace.where} at {pace.step_s:.3f} s a step"


def known_sizes(config: RunConfig) -> tuple[RunConfig, dict[str, SourceSize] | None]:
    """What the manifests of data.sources say, without opening a shard; None if none is named.

    The vocabulary comes with them, where the config leaves it to the tokenizer.
    """
    if not config.data.sources:
        return config, None
    manifests = {name: Manifest.load(Path(name)) for name in config.data.sources}
    sizes = {}
    for name, manifest in manifests.items():
        rows, exact = packed_rows(Path(name), manifest, config.data.packing, config.train.seq_len)
        sizes[name] = SourceSize(units=rows, tokens=manifest.train_tokens, is_exact=exact)
    needed = max(manifest.vocab_size for manifest in manifests.values())
    vocab = config.model.vocab_size or needed
    if vocab < needed:
        raise ConfigError(
            f"model.vocab_size is {vocab} and the data's tokenizer has {needed} tokens; raise it or"
            " leave it at 0."
        )
    return replace(config, model=replace(config.model, vocab_size=vocab)), sizes


def epochs_needed(
    config: RunConfig, horizon: Horizon, sizes: Mapping[str, SourceSize]
) -> dict[str, float]:
    """How often each source is read under the mixture."""
    total = sum(config.data.sources.values())
    units = horizon.steps * horizon.rows_per_step
    return {
        name: units * config.data.sources[name] / total / size.units for name, size in sizes.items()
    }


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
