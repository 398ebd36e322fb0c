"""The plan of a run as one value, on the hardware named, and what-if."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from foundling.config.errors import ConfigError
from foundling.config.model import ModelConfig
from foundling.config.run import RunConfig
from foundling.plan.hardware import Gpu, find_gpu
from foundling.plan.horizon import Horizon, Pace, Sizes, plan_horizon
from foundling.plan.layout import Machine, counted_ranks, lay_out, machine_for
from foundling.plan.memory import OPTIMIZERS, checkpoint_bytes, kept_by_policy, plan_memory
from foundling.plan.params import ParamCounts, count_params, flops_per_token, head_std
from foundling.plan.pitfalls import warnings_of
from foundling.plan.resolve import PlannedConfig, policies_of, refuse_open, resolve
from foundling.plan.speed import Wall, compile_s, plan_speed, plan_wall, start_s
from foundling.plan.supply import Saving, epochs_needed, known_sizes, plan_saving
from foundling.plan.workload import kind_of, work_of, works_of
from foundling.runtime.console import duration, size, table

# `Forecast` is exact and needs no hardware; memory, speed and cost on named GPUs come with `study`.

LEAST_FRESH_LR = 6e-5
"""Peak rate of the largest models that were trained from scratch (Brown et al. 2020, table 2.1);
smaller ones take more, and continued training takes less."""
SMALL_LR = (
    "optim.lr {lr:g} is a fine-tuning rate and the weights begin at random: from scratch even"
    f" GPT-3's 175B took {LEAST_FRESH_LR:g}; name weights with --start, or raise it."
)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Everything that can be said before the first step."""

    params: ParamCounts
    flops_per_token: int
    flops_by_definition: dict[str, int]
    """The same by each way of counting that is in use."""
    first_loss: float | None
    """What the fresh model pays; None while the vocabulary is not known."""
    checkpoint_bytes: int
    checkpoint_holds: str
    """In words."""
    horizon: Horizon | None
    epochs: dict[str, float] | None
    warnings: tuple[str, ...]
    """Of settings that work and are likely a slip."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, for --json and run.json."""
        return asdict(self)


def forecast(
    config: RunConfig,
    data_ranks: int,
    sizes: Sizes | None = None,
    horizon: Horizon | None = None,
) -> Forecast:
    """Plan a run; a config without a horizon still has a shape worth printing."""
    params = count_params(config.model)
    optimizer, lr = kind_of(config.optim), config.optim.lr
    if horizon is None and config.train.horizon:
        horizon = plan_horizon(config, data_ranks, sizes)
    return Forecast(
        params=params,
        flops_per_token=flops_per_token(config.model, config.train.seq_len),
        flops_by_definition=flops_by_definition(config.model, config.train.seq_len),
        first_loss=first_loss(config.model),
        checkpoint_bytes=checkpoint_bytes(config.model, optimizer),
        checkpoint_holds=f"weights and {OPTIMIZERS[optimizer]}",
        horizon=horizon,
        epochs=epochs_needed(horizon, sizes) if horizon and sizes else None,
        warnings=(SMALL_LR.format(lr=lr),)
        if 0 < lr < LEAST_FRESH_LR and not config.train.start
        else (),
    )


def flops_by_definition(model: ModelConfig, seq_len: int) -> dict[str, int]:
    """Training FLOPs of a token, so that another project's MFU can be reproduced.

    N is no-positions, what costs FLOPs, and with embeddings all; a horizon in FLOPs says its own.
    """
    return {
        "full square": flops_per_token(model, seq_len),
        "full square, with embeddings": flops_per_token(model, seq_len, embeddings=True),
        "causal": flops_per_token(model, seq_len, causal=True),
        "causal, with embeddings": flops_per_token(model, seq_len, causal=True, embeddings=True),
        "6 N, no attention": 6 * count_params(model).no_positions,
        "6 N, no attention, with embeddings": 6 * count_params(model).all,
    }


def first_loss(model: ModelConfig) -> float | None:
    """ln V + s^2 / 2: the final norm leaves a mean square of one, so fresh logits are normal with
    variance s^2 = dim * std(head)^2, and their log-sum-exp is that much above ln V."""
    if not model.vocab_size:
        return None
    return math.log(model.vocab_size) + model.dim * head_std(model) ** 2 / 2


# What is predicted for a run on the devices that it has been given.

ASIDE = ("evaluation", "sampling")
"""Moments of the plan whose peak a run keeps apart from training's."""


def predict_run(
    config: RunConfig, kind: str, gpu: Gpu | None, ranks: int, horizon: Horizon
) -> dict[str, float]:
    """Seconds until the run is under way; where the device is known those of a step and of the
    whole run, by part, too, and on CUDA bytes at the peak. `kind` is the device's: cpu, cuda."""
    if gpu is None:
        mode = str(config.train.compile)
        return {"start_s": start_s(kind), "compile_s": compile_s(kind, mode)}
    works = works_of(config, lay_out(config.parallel, ranks, _per_node(gpu, ranks)), gpu)
    seconds = [plan_speed(work, gpu).step_s for work in works]
    found = {"step_s": seconds[0], **seconds_by_part(config, kind, gpu, ranks, horizon, seconds)}
    if kind == "cuda":  # evaluation's peak is reported apart (train/evaluation.py)
        found["memory_peak"] = max(
            sum(parts.values())
            for work in works
            for name, parts in plan_memory(work, gpu).moments.items()
            if name not in ASIDE
        )
    return found


def seconds_by_part(
    config: RunConfig,
    kind: str,
    gpu: Gpu | None,
    ranks: int,
    horizon: Horizon,
    step_seconds: Sequence[float],
) -> dict[str, float]:
    """The whole run by part, from the seconds of a step in each phase."""
    nodes = lay_out(config.parallel, ranks, _per_node(gpu, ranks)).nodes
    saving = plan_saving(config, ranks=ranks, nodes=nodes, step_s=step_seconds[0])
    return asdict(plan_wall(config, horizon, step_seconds, saving, device=kind))


def _per_node(gpu: Gpu | None, ranks: int) -> int:
    """Processes on a CPU are neighbours, however few a node is planned with."""
    return gpu.per_node if gpu is not None and gpu.name != "cpu" else ranks


def _seconds(value: float) -> str:
    return duration(value / 3600) if value >= 120 else f"{value:.3g} s"


FIGURES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "parameters": ("parameters", "{:,}".format),
    "steps": ("steps", "{:,}".format),
    "tokens": ("tokens", "{:,}".format),
    "first_loss": ("loss of the first step", "{:.3f}".format),
    "start_s": ("start", _seconds),
    "compile_s": ("compilation", _seconds),
    "train_s": ("training", _seconds),
    "save_s": ("saves", _seconds),
    "eval_s": ("evaluations", _seconds),
    "tasks_s": ("tasks", _seconds),
    "step_s": ("a step", _seconds),
    "memory_peak": ("memory at its peak", size),
    "checkpoint_bytes": ("checkpoint", size),
}
"""What a run is planned and measured by, in words."""


def compare(plan: Mapping[str, Any]) -> list[str]:
    """A line for each figure that was measured, with what was planned and how far off that was."""
    predicted, measured = plan.get("predicted", {}), plan.get("measured", {})
    width = max(len(label) for label, _ in FIGURES.values())
    lines = []
    for name, (label, text_of) in FIGURES.items():
        was, planned = measured.get(name), predicted.get(name)
        if (not was and not planned) or was is None:
            continue
        line = f"{label:<{width}}  {text_of(was)}"
        if planned is not None:
            off = f", {was / planned - 1:+.1%}" if planned and was != planned else ""
            line += f" (planned {text_of(planned)}{off})"
        lines.append(line)
    return lines


# The whole plan of a run on named hardware: choices, memory, speed, hours, dollars, warnings.
#
# `study` is what `foundling plan --gpu` prints; without a GPU the forecast alone is exact and
# enough.


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of `plan` that are no settings of a run."""

    gpus: int | None = None
    """GPUs of a node."""
    nodes: int | None = None
    price: float | None = None
    """Dollars an hour for one GPU, instead of the table's."""


@dataclass(frozen=True, kw_only=True)
class PlanOnHardware:
    """A run on one kind of hardware."""

    machine: Machine
    choice: PlannedConfig
    horizon: Horizon | None
    warnings: tuple[str, ...]
    kept: dict[str, list[int]]
    """Activation bytes of each block, by recompute policy."""
    saving: Saving
    wall: Wall | None
    """None without a horizon, and where the run does not fit and so takes no time at all."""

    @property
    def hours(self) -> float | None:
        """Of training steps alone."""
        return self.wall.train_s / 3600 if self.wall else None

    @property
    def dollars(self) -> float | None:
        hours, rate = self.hours, self.machine.dollars_per_hour
        return None if hours is None or rate is None else hours * rate

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


def study(
    config: RunConfig, gpu: str, asked: PlanOptions, sizes: Sizes | None = None
) -> PlanOnHardware:
    """Plan a run on so many GPUs of one kind."""
    if not config.model.vocab_size:
        raise ConfigError(
            "model.vocab_size is 0 until a tokenizer is there, and memory and speed depend on it;"
            " give it or data.sources."
        )
    found = find_gpu(gpu)
    if asked.price is not None:
        found = replace(found, price=asked.price)
    machine = machine_for(found, config.parallel, asked.gpus, asked.nodes)
    choice = resolve(config, machine)
    horizon = _horizon(choice, machine, sizes)
    ranks, step_s = machine.world, choice.speed.step_s
    saving = plan_saving(choice.config, ranks=ranks, nodes=machine.nodes, step_s=step_s)
    wall = None
    if horizon and choice.memory.fits:
        seconds = [speed.step_s for speed in choice.speeds]
        kind = "cpu" if found.name == "cpu" else "cuda"
        wall = plan_wall(choice.config, horizon, seconds, saving, device=kind)
    work = work_of(choice.config, choice.layout, found)
    hours = wall.train_s / 3600 if wall else None
    return PlanOnHardware(
        machine=machine,
        choice=choice,
        horizon=horizon,
        kept=kept_by_policy(work, found, policies_of(config.model)),
        saving=saving,
        wall=wall,
        warnings=tuple(warnings_of(choice, machine, horizon, hours, saving)),
    )


def _horizon(choice: PlannedConfig, machine: Machine, sizes: Sizes | None) -> Horizon | None:
    """None without one, and where time or money would buy steps of a run that does not fit."""
    train = choice.config.train
    if not train.horizon or (train.is_timed and not choice.memory.fits):
        return None
    where = f"{machine.world} x {machine.gpu.name}"
    pace = Pace(_mean_step_s(choice, machine), machine.dollars_per_hour, where)
    return plan_horizon(choice.config, choice.layout.data_ranks, sizes, pace)


def _mean_step_s(choice: PlannedConfig, machine: Machine) -> float:
    """Seconds of a step over all phases, for a horizon in time: phases are shares of the steps, and
    the steps those that the time allows."""
    train, seconds = choice.config.train, [speed.step_s for speed in choice.speeds]
    hours, dollars = train.horizon_in("hours"), train.horizon_in("dollars")
    if dollars and machine.dollars_per_hour:
        hours = dollars / machine.dollars_per_hour
    mean = seconds[0]
    for _ in range(4):  # enough for phases that begin at a share, close for those at a step
        steps = max(1, int(hours * 3600 / mean)) if hours else 1_000_000
        starts = (phase.first_step(steps) for phase in choice.config.data.phases)
        firsts = [0, *(min(start, steps) for start in starts)]
        ends = [*firsts[1:], steps]
        mean = sum(s * (b - a) for s, a, b in zip(seconds, firsts, ends, strict=True)) / steps
    return mean


def decided(config: RunConfig, found: PlanOnHardware) -> RunConfig:
    """The config that `foundling plan -o` writes: choices made, horizon in steps where it was in
    time. Other horizons stay as they were said, with their steps in a comment."""
    settled = found.config
    if config.train.is_timed:
        if found.horizon is None:
            raise ConfigError(
                f"the run does not fit on {found.machine.world} x {found.machine.gpu.name}, so time"
                f" and money buy no steps: {found.warnings[0]}"
            )
        settled = settled.replace(train={"horizon": found.horizon.steps})
    return settled


# `--what-if train.seq-len=4096,8192`: the same run with one thing changed, side by side.

Row = dict[str, Any]


def parse_what_if(text: str) -> tuple[str, list[str]]:
    """ "train.seq-len=4096,8192" as the setting and its values."""
    name, equals, values = text.partition("=")
    found = [value.strip() for value in values.split(",") if value.strip()]
    if not equals or "." not in name or not found:
        raise ConfigError(
            f"--what-if {text} compares nothing; write it as train.seq-len=4096,8192."
        )
    return name.strip().removeprefix("--"), found


def what_if(
    resolved: Callable[[Mapping[str, str]], RunConfig],
    changes: Sequence[str],
    machines: Sequence[tuple[str | None, int | None]],
    asked: PlanOptions,
) -> list[Row]:
    """A row for the run as it is and one for every combination of the values, on every machine (a
    GPU's name and a number of nodes)."""
    if not changes:
        return []
    parsed = [parse_what_if(text) for text in changes]
    names = [name for name, _ in parsed]
    variants: list[tuple[str, dict[str, str]]] = [("as it is", {})]
    for values in itertools.product(*(found for _, found in parsed)):
        label = " ".join(f"{n}={v}" for n, v in zip(names, values, strict=True))
        variants.append((label, dict(zip(names, values, strict=True))))
    return [
        {"what": label, **_row(resolved(more), gpu, replace(asked, nodes=nodes))}
        for gpu, nodes in machines
        for label, more in variants
    ]


def _row(config: RunConfig, gpu: str | None, asked: PlanOptions) -> Row:
    config, sizes = known_sizes(config)
    if gpu is None:
        refuse_open(config, "hardware to be planned on")
        ranks = counted_ranks(config.parallel, asked.gpus, asked.nodes)
        plan = forecast(config, ranks, sizes)
        horizon = plan.horizon
        row: Row = {"params": plan.params.all, "flops": plan.flops_per_token}
    else:
        found = study(config, gpu, asked, sizes)
        horizon = found.horizon
        row = {
            "gpu": found.machine.gpu.name,
            "gpus": found.machine.world,
            "params": count_params(config.model).all,
            "batch_size": found.config.train.batch_size,
            "recompute": found.config.parallel.recompute,
            "needed_bytes": found.choice.memory.needed,
            "fits": found.fits,
            **_pace(found),
            "hours": found.hours,
            "dollars": found.dollars,
        }
    if horizon is not None:
        row |= {"positions_per_step": horizon.positions_per_step, "steps": horizon.steps}
    return row


def _pace(found: PlanOnHardware) -> Row:
    """Nothing for a run that does not fit."""
    speed = asdict(found.choice.speed) if found.fits else {}
    return {name: speed.get(name) for name in ("step_s", "tokens_per_s", "mfu")}


def what_if_table(rows: Sequence[Row]) -> list[str]:
    """The rows as text; only columns that some row has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    shown = [[name.replace("_", " ") for name in names]]
    shown += [[_cell(name, row.get(name)) for name in names] for row in rows]
    return table(shown)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "needed_bytes":
        return f"{value / 1e9:,.1f} GB"
    if name == "mfu":
        return f"{value:.1%}"
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, int) or value >= 1000:
        return f"{value:,.0f}"
    return f"{value:,.3f}"
