"""How long a run is: one horizon in, steps and tokens out, with every factor of a step named.

`train` and `plan` both call this, so the forecast and the run cannot disagree.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from foundling.config.data import phase_mixtures, phases_of
from foundling.config.errors import ConfigError
from foundling.config.mixture import WeightsBy, row_weights
from foundling.config.optim import OptimConfig
from foundling.config.packing_spec import PackingSpec
from foundling.config.run import RunConfig
from foundling.config.train import TrainConfig
from foundling.plan.params import count_params
from foundling.runtime.console import counted


@dataclass(frozen=True, kw_only=True)
class SourceSize:
    """What one epoch of a source amounts to once it is packed."""

    units: int
    """Packed rows."""
    tokens: int
    """Real input positions, padding left out."""
    documents: int = 0
    is_exact: bool = True
    """False while the rows are guessed: only `data` can pack."""


Sizes = Sequence[Mapping[str, SourceSize]]
"""For each phase, the size of its sources in its packing."""


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """One phase: how long it is, and the make-up of its steps."""

    first_step: int = 0
    steps: int = 0
    seq_len: int
    packing: str
    weights: dict[str, float]
    """Share of each source in the units."""
    rows_per_step: int
    positions_per_step: int
    tokens_per_step: float
    accumulation: int


@dataclass(frozen=True, kw_only=True)
class Horizon:
    """The length of a run and the make-up of one step of its first phase."""

    steps: int
    tokens: int
    """Real tokens expected over the run, all of its phases."""
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
    tokens_exact: bool = True
    """False when rows are not full, so that tokens are a mean over the rows that happen to come."""
    phases: tuple[PhasePlan, ...] = ()


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
    sizes: Sizes | None = None,
    pace: Pace | None = None,
) -> Horizon:
    """Work out the run's length; without `sizes` every row is taken to be full."""
    phases = _phases(config, data_ranks, sizes)
    rates = [phase.tokens_per_step for phase in phases]
    if config.train.is_timed:
        steps, basis = _steps_in_time(config, pace)
    else:
        steps, basis = _steps(config, rates, sizes)
    if config.optim.warmup > steps:
        raise ConfigError(
            f"optim.warmup is {config.optim.warmup:g} and the run has {steps} steps;"
            " shorten the warm-up."
        )
    is_exact = all(size.is_exact for one in sizes or () for size in one.values())
    timed = phases_of(config.data, config.train.seq_len, steps)
    first = phases[0]
    return Horizon(
        steps=steps,
        tokens=round(_tokens_in(config, steps, rates)),
        tokens_per_step=first.tokens_per_step,
        positions_per_step=first.positions_per_step,
        rows_per_step=first.rows_per_step,
        data_ranks=data_ranks,
        accumulation=first.accumulation,
        warmup_steps=warmup_steps(config.optim, steps),
        basis=basis,
        is_exact=is_exact,
        tokens_exact=is_exact and all(_is_full(phase, known=bool(sizes)) for phase in phases),
        phases=tuple(
            replace(phase, first_step=when.first_step, steps=when.steps)
            for phase, when in zip(phases, timed, strict=True)
        ),
    )


def _is_full(phase: PhasePlan, *, known: bool) -> bool:
    """Whether every row of a phase is: as counted, or as concat makes them."""
    return phase.tokens_per_step == phase.positions_per_step and (
        known or phase.packing == "concat"
    )


def _phases(config: RunConfig, data_ranks: int, sizes: Sizes | None) -> list[PhasePlan]:
    """What a step of each phase is made of; when it begins is not known yet."""
    found = []
    batch = batch_tokens(config, data_ranks)
    for number, (sources, spec) in enumerate(phase_mixtures(config.data, config.train.seq_len)):
        rows = spec.units_per_step(batch)
        size = sizes[number] if sizes else {}
        weights = row_shares(sources, config.data.weights_by, size)
        share = 1.0
        if size:
            per_unit = sum(w * size[name].tokens / size[name].units for name, w in weights.items())
            share = per_unit / spec.positions
        found.append(
            PhasePlan(
                seq_len=spec.seq_len,
                packing=spec.packing,
                weights=weights,
                rows_per_step=rows,
                positions_per_step=rows * spec.positions,
                tokens_per_step=rows * spec.positions * share,
                accumulation=math.ceil(
                    math.ceil(rows / data_ranks) / micro_rows(config.train, spec)
                ),
            )
        )
    return found


def row_shares(
    sources: Mapping[str, float], by: WeightsBy, sizes: Mapping[str, SourceSize]
) -> dict[str, float]:
    """Share of each source in the units; as the weights say where nothing is known yet."""
    weights = row_weights(sources, by, sizes) if sizes else sources
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def batch_tokens(config: RunConfig, data_ranks: int) -> int:
    """Padded tokens of a step, as asked for or from the processes there are."""
    train = config.train
    if train.global_batch_tokens:
        return train.global_batch_tokens
    _, spec = phase_mixtures(config.data, train.seq_len)[0]
    return micro_rows(train, spec) * spec.positions * data_ranks


def micro_rows(train: TrainConfig, spec: PackingSpec) -> int:
    """Units of a micro-step: train.batch_size rows of train.seq_len, and as many tokens of rows of
    another length; a bucket's unit is a micro-step by itself."""
    if spec.packing == "bucket":
        return 1
    return max(1, train.batch_size * train.seq_len // spec.seq_len)


def rows_per_step(config: RunConfig, data_ranks: int) -> int:
    """Units of a global batch of the first phase."""
    _, spec = phase_mixtures(config.data, config.train.seq_len)[0]
    return spec.units_per_step(batch_tokens(config, data_ranks))


def warmup_steps(optim: OptimConfig, steps: int) -> int:
    """Warm-up in steps, of a number or a share of all steps; never more than there are."""
    return min(round(optim.warmup * (steps if optim.warmup < 1 else 1)), steps)


def _tokens_in(config: RunConfig, steps: int, rates: Sequence[float]) -> float:
    """Tokens of a run of so many steps, its phases read at these rates."""
    firsts = [0, *(phase.first_step(steps) for phase in config.data.phases)]
    ends = [*firsts[1:], steps]
    return sum(
        rate * max(0, min(end, steps) - begin)
        for rate, begin, end in zip(rates, firsts, ends, strict=True)
    )


def _steps(config: RunConfig, rates: Sequence[float], sizes: Sizes | None) -> tuple[int, str]:
    train = config.train
    if not train.horizon:
        raise ConfigError("the run has no horizon; give train.horizon, such as 20B tokens.")
    params = count_params(config.model).of(train.param_count)
    if asked := int(train.horizon_in("steps")):
        return asked, counted(asked, "step")
    if epochs := train.horizon_in("epochs"):
        if not sizes:
            raise ConfigError(
                f"train.horizon {train.horizon} needs data.sources that are built; build them"
                " first."
            )
        every = {name: size.tokens for one in sizes for name, size in one.items()}
        tokens = epochs * sum(every.values())
        # Down, not up: an epoch is a promise that nothing is read twice.
        steps = _steps_for(config, tokens * (1 + 1e-12), rates)
        reaches = _tokens_in(config, steps, rates) <= tokens * (1 + 1e-12)
        return max(
            1, steps if reaches else steps - 1
        ), f"{epochs:g} {'epoch' if epochs == 1 else 'epochs'}"
    if flops := train.horizon_in("flops"):
        tokens = flops / (6 * params)
        basis = f"{flops:g} FLOP at 6 x {params:,} ({train.param_count}) a token"
    elif each := train.horizon_in("tokens/param"):
        tokens = each * params
        basis = f"{each:g} tokens per parameter ({train.param_count}: {params:,})"
    else:
        tokens = train.horizon_in("tokens")
        basis = f"{tokens:,.0f} tokens"
    return _steps_for(config, tokens, rates), basis


def _steps_for(config: RunConfig, tokens: float, rates: Sequence[float]) -> int:
    """The fewest steps that read so many tokens."""
    low, high = 1, math.ceil(tokens / min(rates))
    while low < high:
        middle = (low + high) // 2
        if _tokens_in(config, middle, rates) >= tokens:
            high = middle
        else:
            low = middle + 1
    return low


def _steps_in_time(config: RunConfig, pace: Pace | None) -> tuple[int, str]:
    """Steps that hours or dollars pay for; down, because neither may be exceeded."""
    train = config.train
    hours, dollars = train.horizon_in("hours"), train.horizon_in("dollars")
    asked = f"{hours:g} hours" if hours else f"${dollars:,g}"
    if pace is None:
        raise ConfigError(f"a horizon of {asked} needs hardware to be planned on; give --gpu NAME.")
    if dollars:
        if pace.dollars_per_hour is None:
            raise ConfigError(f"{pace.where} has no price, so {asked} buy no steps; give --price.")
        hours = dollars / pace.dollars_per_hour
    steps = math.floor(hours * 3600 / pace.step_s)
    if steps < 1:
        raise ConfigError(f"{asked} on {pace.where} are less than one step; give more.")
    return steps, f"{asked} on {pace.where} at {pace.step_s:.3f} s a step"
