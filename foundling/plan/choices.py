"""What `auto` picks: micro-batch, recompute policy and layout, from the plan and with a reason.

Every candidate is planned and the fastest that leaves headroom wins; a few hundred plans take some
milliseconds. Rejected: the largest batch that fits, which is not always the fastest, and doubling
until the device runs out of memory, which needs the device.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from foundling.config.errors import ConfigError
from foundling.config.recompute import AUTO, recompute_interval
from foundling.config.sections import RunConfig
from foundling.plan.coefficients import COEFFICIENTS as K
from foundling.plan.horizon import rows_per_step
from foundling.plan.layout import Layout, Machine, lay_out, with_layout
from foundling.plan.memory import Memory, plan_memory
from foundling.plan.speed import Speed, plan_speed
from foundling.plan.work import works_of

POLICIES = ("none", "per-op", "every-4", "every-3", "every-2", "all")
LARGEST_BATCH = 1024
WORTH = 1.03
"""Another layout must be this much faster to be taken instead of plain replicas."""


@dataclass(frozen=True)
class Choice:
    """A config with nothing left open, where it runs and why."""

    config: RunConfig
    layout: Layout
    memory: Memory
    """Of the phase that needs the most."""
    speed: Speed
    """Of the first phase."""
    speeds: tuple[Speed, ...] = ()
    """Of each phase."""
    reasons: tuple[str, ...] = ()


def settle(config: RunConfig, machine: Machine, optimizer: str = "adamw") -> Choice:
    """Fill in what the config leaves to the plan."""
    parallel = config.parallel
    named = parallel.replicate or parallel.shard > 1 or parallel.tensor > 1
    if named or machine.world == 1:
        layout = lay_out(parallel, machine.world, machine.per_node)
        return _settle_on(config, machine, layout, optimizer)
    return _settle_layout(config, machine, optimizer)


def _settle_layout(config: RunConfig, machine: Machine, optimizer: str) -> Choice:
    """Replicas where they fit, shards where they do not, tensor parallelism as the last resort."""
    plain = _settle_on(
        config, machine, lay_out(config.parallel, machine.world, machine.per_node), optimizer
    )
    tried = [plain]
    # Tensor parallelism reads fewer rows at once: with a batch that was named it would be another
    # run, so it is only tried where the batch is open or cannot be cut.
    may_split = config.train.batch_size <= 1
    for layout in _layouts(machine):
        if layout.tensor > 1 and (not may_split or any(c.memory.fits for c in tried)):
            break
        tried.append(_settle_on(config, machine, layout, optimizer))
    fitting = [choice for choice in tried if choice.memory.fits]
    if not fitting:
        return plain
    best = max(fitting, key=lambda choice: choice.speed.tokens_per_s)
    if plain.memory.fits and best.speed.tokens_per_s < WORTH * plain.speed.tokens_per_s:
        return _because(plain, f"layout {plain.layout}: whole replicas fit, nothing is faster")
    if plain.memory.fits:
        gain = best.speed.tokens_per_s / plain.speed.tokens_per_s - 1
        return _because(best, f"layout {best.layout}: {gain:.0%} faster than whole replicas")
    need, have = plain.memory.needed / 1e9, plain.memory.capacity / 1e9
    return _because(
        best,
        f"layout {best.layout}: a whole replica needs {need:,.1f} GB of {have:,.1f}, this"
        f" {best.memory.needed / 1e9:,.1f}",
    )


def _layouts(machine: Machine) -> Iterator[Layout]:
    per_node, world = machine.per_node, machine.world
    for tensor in (1, 2, 4, 8):
        if tensor > per_node or per_node % tensor:
            continue
        for shard in sorted({2, 4, 8, 16, 32, 64, 128, 256, per_node // tensor, world // tensor}):
            if shard > 1 and world % (shard * tensor) == 0:
                yield Layout(
                    replicate=world // (shard * tensor),
                    shard=shard,
                    tensor=tensor,
                    per_node=per_node,
                )


def _settle_on(config: RunConfig, machine: Machine, layout: Layout, optimizer: str) -> Choice:
    """The fastest batch and policy that fit on this layout, where they are left open."""
    config = replace(config, parallel=with_layout(config.parallel, layout))
    open_batch, open_policy = not config.train.batch_size, config.parallel.recompute == AUTO
    if not open_batch and not open_policy:
        return _planned(config, machine, layout, optimizer)
    weighed: list[tuple[Memory, RunConfig]] = []
    full: set[str] = set()
    for candidate in _candidates(config, layout, open_batch, open_policy):
        # Batches come in order: after the first that is too large, all are.
        if candidate.parallel.recompute not in full:
            weighed.append((_memory(candidate, machine, layout, optimizer), candidate))
            if not _leaves_room(weighed[-1][0]):
                full.add(candidate.parallel.recompute)
    fitting = [
        _planned(candidate, machine, layout, optimizer)
        for memory, candidate in weighed
        if _leaves_room(memory)
    ]
    if not fitting:
        _, candidate = min(weighed, key=lambda pair: pair[0].needed)
        least = _planned(candidate, machine, layout, optimizer)
        return _because(least, "auto: nothing fits; this needs the least memory of all")
    best = max(fitting, key=lambda choice: choice.speed.tokens_per_s)
    # A percent of speed is not worth a third more memory.
    thrifty = [c for c in fitting if c.speed.tokens_per_s >= 0.995 * best.speed.tokens_per_s]
    best = min(thrifty, key=lambda choice: choice.memory.needed)
    return _because(best, _why(best, fitting, len(weighed), open_batch, open_policy))


def _leaves_room(memory: Memory) -> bool:
    """Whether enough stays free: a share, and one more of the largest tensor.

    Measured with a plain loss: logits of 26 GB found 12% of the device free, but in pieces.
    """
    free = max(K.headroom * memory.capacity, memory.largest)
    return memory.needed + free <= memory.capacity


def _why(
    best: Choice, fitting: list[Choice], tried: int, open_batch: bool, open_policy: bool
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
    config: RunConfig, layout: Layout, open_batch: bool, open_policy: bool
) -> Iterator[RunConfig]:
    most = LARGEST_BATCH
    if config.train.global_batch_tokens:
        most = -(-rows_per_step(config, layout.data_ranks) // layout.data_ranks)
    sizes = sorted({side << i for i in range(11) for side in (1, 3)} | {most})
    batches = [size for size in sizes if size <= most] if open_batch else [config.train.batch_size]
    layers = config.model.layers
    policies = [p for p in POLICIES if recompute_interval(p) <= layers]
    for policy in policies if open_policy else [config.parallel.recompute]:
        for batch in batches:
            yield replace(
                config,
                train=replace(config.train, batch_size=batch),
                parallel=replace(config.parallel, recompute=policy),
            )


def _planned(config: RunConfig, machine: Machine, layout: Layout, optimizer: str) -> Choice:
    memory = _memory(config, machine, layout, optimizer)
    works = works_of(config, layout, machine.gpu, optimizer)
    speeds = tuple(plan_speed(work, machine.gpu) for work in works)
    return Choice(config, layout, memory, speeds[0], speeds)


def _memory(config: RunConfig, machine: Machine, layout: Layout, optimizer: str) -> Memory:
    """Of the phase that needs the most: a run must fit from its first step to its last."""
    works = works_of(config, layout, machine.gpu, optimizer)
    return max((plan_memory(work, machine.gpu) for work in works), key=lambda m: m.needed)


def _because(choice: Choice, reason: str) -> Choice:
    return replace(choice, reasons=(*choice.reasons, reason))


def refuse_open(config: RunConfig, needed_by: str) -> None:
    """A plan without a GPU can fill nothing in."""
    left = []
    if not config.train.batch_size:
        left.append("train.batch_size auto")
    if config.parallel.recompute == AUTO:
        left.append("parallel.recompute auto")
    left += [f"train.{name}" for name in ("hours", "dollars") if getattr(config.train, name)]
    if left:
        raise ConfigError(f"{left[0]} needs {needed_by}, such as --gpu h200.")


def largest_batch(config: RunConfig, machine: Machine, layout: Layout, optimizer: str) -> int:
    """The largest micro-batch of a settled config that fits; 0 where none does."""
    fits, batch = 0, 1
    while batch <= LARGEST_BATCH:
        tried = replace(config, train=replace(config.train, batch_size=batch))
        if not _planned(tried, machine, layout, optimizer).memory.fits:
            break
        fits, batch = batch, batch + max(1, batch // 8)
    return fits
