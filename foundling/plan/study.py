"""The whole plan of a run on named hardware: choices, memory, speed, hours, dollars, warnings.

`study` is what `foundling plan --gpu` prints; without a GPU the forecast alone is exact and enough.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from foundling.config.checks import horizons
from foundling.config.errors import ConfigError
from foundling.config.phases import start_of
from foundling.config.recompute import recompute_interval
from foundling.config.sections import RunConfig
from foundling.plan.activations import kept_by_policy
from foundling.plan.choices import POLICIES, Choice, settle
from foundling.plan.hardware import find_gpu, price_at
from foundling.plan.horizon import Horizon, Pace, Sizes, plan_horizon
from foundling.plan.layout import Machine, machine_for
from foundling.plan.saving import Saving, plan_saving
from foundling.plan.traps import warnings_of
from foundling.plan.wall import Wall, plan_wall
from foundling.plan.work import work_of


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of `plan` that are no settings of a run."""

    gpus: int | None = None
    """GPUs of a node."""
    nodes: int | None = None
    price: float | None = None
    """Dollars an hour for one GPU, instead of the table's."""
    provider: str = ""
    """Whose prices to take, of the user's file."""
    optimizer: str = ""


@dataclass(frozen=True, kw_only=True)
class Study:
    """A run on one kind of hardware."""

    machine: Machine
    choice: Choice
    horizon: Horizon | None
    hours: float | None
    """None without a horizon, and where the run does not fit and so takes no time at all."""
    dollars: float | None
    warnings: tuple[str, ...]
    kept: dict[str, list[int]]
    """Activation bytes of each block, by recompute policy."""
    saving: Saving
    wall: Wall | None
    """None where `hours` is."""

    @property
    def config(self) -> RunConfig:
        """The config with every choice made."""
        return self.choice.config

    @property
    def fits(self) -> bool:
        return self.choice.memory.fits

    def to_json(self) -> dict[str, Any]:
        gpu, train = self.machine.gpu, self.config.train
        return {
            "gpu": gpu.name,
            "source": gpu.source,
            "price": gpu.price,
            "gpus_per_node": self.machine.per_node,
            "nodes": self.machine.nodes,
            "gpus": self.machine.world,
            "layout": asdict(self.choice.layout) | {"data_ranks": self.choice.layout.data_ranks},
            "batch_size": train.batch_size,
            "recompute": self.config.parallel.recompute,
            "horizon": asdict(self.horizon) if self.horizon else None,
            "memory": self.choice.memory.to_json(),
            "activations_by_policy": self.kept,
            "speed": self.choice.speed.to_json() if self.fits else None,
            "hours": self.hours,
            "wall": asdict(self.wall) if self.wall else None,
            "dollars": self.dollars,
            "saving": asdict(self.saving) if self.fits else None,
            "reasons": list(self.choice.reasons),
            "warnings": list(self.warnings),
        }


def study(config: RunConfig, gpu: str, asked: Asked, sizes: Sizes | None = None) -> Study:
    """Plan a run on so many GPUs of one kind."""
    if not config.model.vocab_size:
        raise ConfigError(
            "model.vocab_size is 0 until a tokenizer is there, and memory and speed depend on it;"
            " give it or data.sources."
        )
    found = find_gpu(gpu)
    if asked.price is not None:
        found = replace(found, price=asked.price)
    elif asked.provider:
        found = replace(found, price=price_at(asked.provider, found))
    machine = machine_for(found, config.parallel, asked.gpus, asked.nodes)
    choice = settle(config, machine, asked.optimizer)
    horizon = _horizon(choice, machine, sizes)
    saving = plan_saving(
        choice.config,
        ranks=machine.world,
        nodes=machine.nodes,
        step_s=choice.speed.step_s,
        optimizer=asked.optimizer,
    )
    wall = None
    if horizon and choice.memory.fits:
        seconds = [speed.step_s for speed in choice.speeds]
        kind = "cpu" if found.name == "cpu" else "cuda"
        wall = plan_wall(choice.config, horizon, seconds, saving, device=kind)
    hours = wall.train_s / 3600 if wall else None
    rate = machine.dollars_per_hour
    work = work_of(choice.config, choice.layout, found, asked.optimizer)
    policies = [p for p in POLICIES if recompute_interval(p) <= config.model.layers]
    return Study(
        machine=machine,
        choice=choice,
        horizon=horizon,
        hours=hours,
        dollars=hours * rate if hours is not None and rate is not None else None,
        kept=kept_by_policy(work, found, policies),
        saving=saving,
        wall=wall,
        warnings=tuple(warnings_of(choice, machine, horizon, hours, asked.optimizer, saving)),
    )


def _horizon(choice: Choice, machine: Machine, sizes: Sizes | None) -> Horizon | None:
    """None without one, and where time or money would buy steps of a run that does not fit."""
    train = choice.config.train
    in_time = train.hours or train.dollars
    if not horizons(train) or (in_time and not choice.memory.fits):
        return None
    where = f"{machine.world} x {machine.gpu.name}"
    pace = Pace(_mean_step_s(choice, machine), machine.dollars_per_hour, where)
    return plan_horizon(choice.config, choice.layout.data_ranks, sizes, pace)


def _mean_step_s(choice: Choice, machine: Machine) -> float:
    """Seconds of a step over all phases, for a horizon in time: phases are shares of the steps, and
    the steps those that the time allows."""
    train, seconds = choice.config.train, [speed.step_s for speed in choice.speeds]
    hours = train.hours
    if train.dollars and machine.dollars_per_hour:
        hours = train.dollars / machine.dollars_per_hour
    mean = seconds[0]
    for _ in range(4):  # enough for phases that begin at a share, close for those at a step
        steps = max(1, int(hours * 3600 / mean)) if hours else 1_000_000
        starts = (start_of(phase.at, steps) for phase in choice.config.data.phases)
        firsts = [0, *(min(start, steps) for start in starts)]
        ends = [*firsts[1:], steps]
        mean = sum(s * (b - a) for s, a, b in zip(seconds, firsts, ends, strict=True)) / steps
    return mean


def studies(
    config: RunConfig,
    gpus: Sequence[str],
    nodes: Sequence[int | None],
    asked: Asked,
    sizes: Sizes | None = None,
) -> list[Study]:
    """Every named GPU at every named number of nodes."""
    return [
        study(config, gpu, replace(asked, nodes=count), sizes)
        for gpu in gpus
        for count in (nodes or (asked.nodes,))
    ]


def decided(config: RunConfig, found: Study) -> RunConfig:
    """The config that `foundling config` writes: choices made, horizon in steps where it was in
    time. Other horizons stay as they were said, with their steps in a comment."""
    settled = found.config
    if config.train.hours or config.train.dollars:
        if found.horizon is None:
            raise ConfigError(
                f"the run does not fit on {found.machine.world} x {found.machine.gpu.name}, so time"
                f" and money buy no steps: {found.warnings[0]}"
            )
        train = replace(settled.train, hours=0.0, dollars=0.0, steps=found.horizon.steps)
        settled = replace(settled, train=train)
    return settled
