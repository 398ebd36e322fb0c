"""What a config leaves open, resolved in one place: `auto`, zeros that stand for a default, and
what training would refuse.

`resolve` answers for hardware that is described (plan), `resolve_here` for the machine at hand
(train, bench, doctor); `problems` are the sentences with which a start would end.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from foundling.config.data import all_sources
from foundling.config.data_manifest import Manifest
from foundling.config.errors import ConfigError, RunError, UserError
from foundling.config.model import ModelConfig
from foundling.config.parallel import AUTO, recompute_interval
from foundling.config.run import RunConfig, check_resolved, check_world, unresolved_settings
from foundling.plan.horizon import Horizon, Sizes, batch_tokens, plan_horizon, rows_per_step
from foundling.plan.layout import Machine, MeshLayout, lay_out, layouts_of, with_layout
from foundling.plan.memory import MemoryEstimate, plan_memory
from foundling.plan.roofline import COEFFICIENTS as K
from foundling.plan.speed import Speed, plan_speed
from foundling.plan.supply import (
    Fingerprint,
    check_supply,
    data_problems,
    known_sizes,
    with_vocabulary,
)
from foundling.plan.workload import works_of
from foundling.runtime.run_dir import RunDir

# What `auto` picks: micro-batch, recompute policy and layout, from the plan and with a reason.
#
# Every candidate is planned and the fastest that leaves headroom wins; a few hundred plans take
# some milliseconds. Rejected: the largest batch that fits, which is not always the fastest, and
# doubling until the device runs out of memory, which needs the device.

POLICIES = ("none", "per-op", "ffn", "every-4", "every-3", "every-2", "all")
LARGEST_BATCH = 1024
TENSOR_DEGREES = (1, 2, 4, 8)
NEAR = 0.97
"""Layouts of this share of the best one's speed count as equal."""
WORTH = 0.10
"""Another layout must be this much faster to be taken instead of plain replicas: they are simpler,
and the latencies that speak against others are the least certain part of the plan."""


@dataclass(frozen=True)
class PlannedConfig:
    """A config with nothing left open, where it runs and why."""

    config: RunConfig
    layout: MeshLayout
    memory: MemoryEstimate
    """Of the phase that needs the most."""
    speeds: tuple[Speed, ...]
    """Of each phase."""
    reasons: tuple[str, ...] = ()

    @property
    def speed(self) -> Speed:
        """Of the first phase."""
        return self.speeds[0]


def resolve(config: RunConfig, machine: Machine) -> PlannedConfig:
    """Fill in what the config leaves to the plan."""
    parallel = config.parallel
    named = parallel.replicate or parallel.shard > 1 or parallel.tensor > 1
    if named or machine.world == 1:
        layout = lay_out(parallel, machine.world, machine.per_node)
        return _settle_on(config, machine, layout)
    return _settle_layout(config, machine)


def _settle_layout(config: RunConfig, machine: Machine) -> PlannedConfig:
    """Replicas where they fit, shards where they do not, tensor parallelism as the last resort:
    its ranks share their rows, so a step of a named batch has fewer."""
    plain = _settle_on(config, machine, lay_out(config.parallel, machine.world, machine.per_node))
    tried = [plain]
    for tensor in TENSOR_DEGREES:
        layouts = layouts_of(config.model, machine, tensor)
        tried += [_settle_on(config, machine, layout) for layout in layouts]
        fitting = [choice for choice in tried if choice.memory.fits]
        if fitting:
            return _best_layout(plain, fitting)
    least = min(tried, key=lambda choice: choice.memory.needed)
    return _because(
        least,
        f"layout {least.layout}: nothing fits on {machine.world} GPUs; of the {len(tried)} layouts"
        " tried this one needs the least memory",
    )


def _best_layout(plain: PlannedConfig, fitting: list[PlannedConfig]) -> PlannedConfig:
    """The fastest, or one as fast that is spread over fewer GPUs; and plain replicas unless it is
    clearly faster."""
    fastest = max(choice.speed.tokens_per_s for choice in fitting)
    near = [choice for choice in fitting if choice.speed.tokens_per_s >= NEAR * fastest]
    best = min(near, key=lambda choice: (choice.layout.tensor, choice.layout.shard))
    gain = best.speed.tokens_per_s / plain.speed.tokens_per_s - 1
    if plain.memory.fits and gain < WORTH:
        return _because(
            plain, f"layout {plain.layout}: whole replicas fit, and nothing is {WORTH:.0%} faster"
        )
    if plain.memory.fits:
        return _because(best, f"layout {best.layout}: {gain:.0%} faster than whole replicas")
    need, have = plain.memory.needed / 1e9, plain.memory.capacity / 1e9
    reason = (
        f"layout {best.layout}: a whole replica needs {need:,.1f} GB of {have:,.1f}, this"
        f" {best.memory.needed / 1e9:,.1f}"
    )
    if best.layout.tensor > 1 and not best.config.train.global_batch_tokens:
        reason += (
            f"; {best.layout.tensor} tensor-parallel ranks share their rows, so a step has"
            f" {best.config.train.batch_size * best.layout.data_ranks} rows"
        )
    return _because(best, reason)


def _settle_on(config: RunConfig, machine: Machine, layout: MeshLayout) -> PlannedConfig:
    """The fastest batch and policy that fit on this layout, where they are left open."""
    config = config.replace(parallel=with_layout(config.parallel, layout))
    open_batch, open_policy = not config.train.batch_size, config.parallel.recompute == AUTO
    if not (open_batch or open_policy):
        return planned(config, machine, layout)
    weighed: list[tuple[MemoryEstimate, RunConfig]] = []
    for candidates in _candidates(config, layout, open_batch, open_policy):
        for candidate in candidates:
            weighed.append((_memory(candidate, machine, layout), candidate))
            if not leaves_room(weighed[-1][0]):
                break  # batches come in order: after the first that is too large, all are
    fitting = [
        planned(candidate, machine, layout) for memory, candidate in weighed if leaves_room(memory)
    ]
    if not fitting:
        _, candidate = min(weighed, key=lambda pair: pair[0].needed)
        least = planned(candidate, machine, layout)
        return _because(least, "auto: nothing fits on this layout; this needs the least memory")
    best = max(fitting, key=lambda choice: choice.speed.tokens_per_s)
    # A percent of speed is not worth a third more memory.
    thrifty = [c for c in fitting if c.speed.tokens_per_s >= 0.995 * best.speed.tokens_per_s]
    best = min(thrifty, key=lambda choice: choice.memory.needed)
    return _because(best, _why(best, fitting, len(weighed), open_batch, open_policy))


def leaves_room(memory: MemoryEstimate) -> bool:
    """Whether enough stays free: a share, and one more of the largest tensor.

    Measured with a plain loss: logits of 26 GB found 12% of the device free, but in pieces.
    """
    free = max(K.headroom * memory.capacity, memory.largest)
    return memory.needed + free <= memory.capacity


def _why(
    best: PlannedConfig,
    fitting: list[PlannedConfig],
    tried: int,
    open_batch: bool,
    open_policy: bool,
) -> str:
    batch, policy = best.config.train.batch_size, best.config.parallel.recompute
    picked = [f"train.batch_size {batch}"] if open_batch else []
    picked += [f"parallel.recompute {policy}"] if open_policy else []
    said = (
        f"auto: {' and '.join(picked)}, the fastest of {len(fitting)} that fit of {tried}"
        f" tried ({best.memory.needed / 1e9:,.1f} of {best.memory.capacity / 1e9:,.1f} GB,"
        f" {max(K.headroom, best.memory.largest / best.memory.capacity):.0%} kept free)"
    )
    larger = [
        c
        for c in fitting
        if c.config.train.batch_size > batch and c.config.parallel.recompute == policy
    ]
    if larger:
        rate = max(c.speed.tokens_per_s for c in larger) / best.speed.tokens_per_s - 1
        said += f"; a larger batch would fit and bring {max(rate, 0.0):.1%}"
    return said


def _candidates(
    config: RunConfig, layout: MeshLayout, open_batch: bool, open_policy: bool
) -> Iterator[Iterator[RunConfig]]:
    """For each policy its batches, the smallest first."""
    most = LARGEST_BATCH
    if config.train.global_batch_tokens:
        most = -(-rows_per_step(config, layout.data_ranks) // layout.data_ranks)
    sizes = sorted({side << i for i in range(11) for side in (1, 3)} | {most})
    batches = [size for size in sizes if size <= most] if open_batch else [config.train.batch_size]
    policies = policies_of(config.model) if open_policy else [config.parallel.recompute]
    for policy in policies:
        parallel = config.parallel.replace(recompute=policy)
        yield (config.replace(train={"batch_size": batch}, parallel=parallel) for batch in batches)


def policies_of(model: ModelConfig) -> list[str]:
    """The recompute policies that mean something in so many layers."""
    return [policy for policy in POLICIES if recompute_interval(policy) <= model.layers]


def planned(config: RunConfig, machine: Machine, layout: MeshLayout) -> PlannedConfig:
    """A config with nothing left open, weighed and timed."""
    works = works_of(config, layout, machine.gpu)
    speeds = tuple(plan_speed(work, machine.gpu) for work in works)
    return PlannedConfig(config, layout, _memory(config, machine, layout), speeds)


def _memory(config: RunConfig, machine: Machine, layout: MeshLayout) -> MemoryEstimate:
    """Of the phase that needs the most: a run must fit from its first step to its last."""
    works = works_of(config, layout, machine.gpu)
    return max((plan_memory(work, machine.gpu) for work in works), key=lambda m: m.needed)


def _because(choice: PlannedConfig, reason: str) -> PlannedConfig:
    return replace(choice, reasons=(*choice.reasons, reason))


def refuse_open(config: RunConfig, needed_by: str) -> None:
    """A plan without a GPU can fill nothing in."""
    if left := unresolved_settings(config):
        raise ConfigError(f"{left[0]} needs {needed_by}, such as --gpu h200.")


def fits(config: RunConfig, machine: Machine, layout: MeshLayout) -> bool:
    """Whether a config with nothing left open fits on a layout, every phase of it."""
    config = config.replace(parallel=with_layout(config.parallel, layout))
    return _memory(config, machine, layout).fits


# On the machine at hand: what train, bench and doctor resolve, measuring where nothing else tells.


@dataclass(frozen=True)
class Resolution:
    """A config in which every setting has a value, how long the run is, and why."""

    config: RunConfig
    horizon: Horizon
    reasons: tuple[str, ...] = ()
    """Of each choice that was measured."""

    def measured_on(self, device: "PresentDevice") -> "Resolution":
        """With what only this device can tell, and why; it may take a minute."""
        config, reasons = device.measured(self.config, self.horizon.steps)
        return Resolution(config, self.horizon, tuple(reasons))


class PresentDevice(Protocol):
    """A device that answers by what it has and by launching; train/autotune has the real one."""

    @property
    def settings(self) -> dict[str, str | int]:
        """train.device, dtype and threads as they are here."""
        ...

    def measured(self, config: RunConfig, steps: int) -> tuple[RunConfig, list[str]]:
        """Kernels and compile mode of a run of so many steps, and a reason for each."""
        ...


def resolve_here(
    config: RunConfig,
    device: PresentDevice,
    *,
    vocab_size: int,
    data_ranks: int,
    sizes: Sizes,
    steps: int = 0,
) -> Resolution:
    """Fill in everything that is open and needs no measuring, so that the run records it and a
    resume on another machine is held to it. `vocab_size` is the tokenizer's; `steps` the length of
    a run that goes on (0: a new one, for which there must be data enough)."""
    config = with_vocabulary(config, vocab_size)
    tokens = batch_tokens(config, data_ranks)
    kind, given, found = config.train.float8, config.train.dtype, device.settings["dtype"]
    if kind != "none" and given == AUTO and found != "bf16":
        raise ConfigError(
            f"train.float8 {kind} needs train.dtype bf16, and auto is {found} on this device; set"
            " train.dtype bf16 or train.float8 none."
        )
    config = config.replace(train={"global_batch_tokens": tokens, **device.settings})
    planned_again = config.replace(train={"horizon": steps}) if steps else config
    horizon = plan_horizon(planned_again, data_ranks, sizes)
    if not steps:
        check_supply(config, horizon, sizes)
    return Resolution(config, horizon)


# What training would refuse, told before it starts.
#
# A refusal here costs a second and leaves no files; the same one by the ranks costs the start
# of all of them, and under --detach it would go unread. Imports no torch.


def problems(
    config: RunConfig,
    *,
    run: Path | None = None,
    world: int = 0,
    per_node: int = 0,
    fingerprint: Fingerprint | None = None,
    with_data: bool = True,
) -> Iterator[UserError]:
    """What training would end with, in the order in which it would find it; `world` is the number
    of processes, `fingerprint` that of a tokenizer's folder, `with_data` False where the data lie
    out of sight."""
    is_new = run is None or not RunDir(run).exists
    checks: list[Callable[[], object]] = [lambda: check_resolved(config)]
    if run is not None:
        checks.append(lambda: check_folder(run))
    if world:
        checks.append(lambda: lay_out(config.parallel, world, per_node or world))
    if world and is_new:
        checks.append(lambda: check_world(config, world))
    checks.append(lambda: require_sources(config))
    for check in checks:
        try:
            check()
        except UserError as error:
            yield error
    if with_data and config.data.sources and not config.data.follow:
        yield from _of_data(config, world if is_new else 0, fingerprint)


def _of_data(config: RunConfig, world: int, fingerprint: Fingerprint | None) -> Iterator[UserError]:
    """Data sets that are not whole or do not fit; too little of them, for a new run of `world`."""
    try:
        manifests = {name: Manifest.load(Path(name)) for name in all_sources(config.data)}
        yield from data_problems(config, manifests, fingerprint)
        if world and config.train.horizon and not config.train.is_timed:
            config, sizes = known_sizes(config)
            ranks = lay_out(config.parallel, world, world).data_ranks
            check_supply(config, plan_horizon(config, ranks, sizes), sizes or [])
    except UserError as error:
        yield error


def check_folder(run: Path) -> None:
    """Refuse a finished run, which is never overwritten, and a folder that is no run."""
    if run.exists() and not run.is_dir():
        raise RunError(f"{run} is a file; give --run a folder.")
    directory = RunDir(run)
    directory.refuse_other_files()
    if directory.exists and (info := directory.read_info())["status"] == "finished":
        step = info.get("plan", {}).get("measured", {}).get("steps", "STEP")
        raise RunError(
            f"{run} is finished at step {step}; train further with --from {run}@{step}"
            " --train.horizon N --run NEW, or give another --run."
        )


def require_sources(config: RunConfig) -> tuple[str, ...]:
    """The data sets that are named; a run without any is refused."""
    if not config.data.sources:
        raise ConfigError(
            "data.sources is empty; build a data set with `foundling data build` and name its"
            " folder: --data.sources data/mine."
        )
    return all_sources(config.data)
