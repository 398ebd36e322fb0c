"""A run that does not fit: what alone would be enough, in words.

Tried in the order in which they change the run least: another policy, a smaller batch, another
layout of the same GPUs, more GPUs. Only memory is planned, so it takes some milliseconds.
"""

from collections.abc import Iterator
from dataclasses import replace

from foundling.config.recompute import recompute_interval
from foundling.config.sections import RunConfig
from foundling.plan.choices import (
    LARGEST_BATCH,
    POLICIES,
    TENSOR_DEGREES,
    Choice,
    fits,
)
from foundling.plan.layout import Layout, Machine, layouts_of

MOST_GPUS = 16_384


def remedies(choice: Choice, machine: Machine, optimizer: str) -> list[str]:
    """What would make a choice fit, each by itself."""
    config, layout = choice.config, choice.layout
    best = largest_batch(config, machine, layout, optimizer)
    found = [
        f"the largest that does is {best} (train.batch_size auto picks)"
        if best
        else "no batch does on this layout"
    ]
    policy = _policy(config, machine, layout, optimizer)
    if policy:
        found.append(f"parallel.recompute {policy} would do")
    other = _layout(config, machine, optimizer)
    if other is not None:
        found.append(f"{other} would do")
    if not (best or policy or other):
        found.append(_more_gpus(config, machine, optimizer))
    return found


def largest_batch(config: RunConfig, machine: Machine, layout: Layout, optimizer: str) -> int:
    """The largest micro-batch of a settled config that fits; 0 where none does."""
    found, batch = 0, 1
    while batch <= LARGEST_BATCH:
        tried = replace(config, train=replace(config.train, batch_size=batch))
        if not fits(tried, machine, layout, optimizer):
            break
        found, batch = batch, batch + max(1, batch // 8)
    return found


def _policies(config: RunConfig) -> Iterator[RunConfig]:
    for policy in POLICIES:
        if recompute_interval(policy) <= config.model.layers:
            yield replace(config, parallel=replace(config.parallel, recompute=policy))


def _policy(config: RunConfig, machine: Machine, layout: Layout, optimizer: str) -> str:
    for tried in _policies(config):
        if fits(tried, machine, layout, optimizer):
            return tried.parallel.recompute
    return ""


def _layout(config: RunConfig, machine: Machine, optimizer: str) -> Layout | None:
    for tensor in TENSOR_DEGREES:
        for layout in layouts_of(config.model, machine, tensor):
            if fits(config, machine, layout, optimizer):
                return layout
    return None


def _more_gpus(config: RunConfig, machine: Machine, optimizer: str) -> str:
    """The fewest GPUs, doubled from those there are, on which one row fits with everything
    recomputed."""
    least = replace(
        config,
        train=replace(config.train, batch_size=1),
        parallel=replace(config.parallel, recompute="all"),
    )
    tried = replace(machine, per_node=max(machine.per_node, machine.gpu.per_node))
    while tried.world <= MOST_GPUS:
        layout = _layout(least, tried, optimizer)
        if layout is not None:
            return (
                f"{tried.world} GPUs would do ({layout}, parallel.recompute all,"
                " train.batch_size 1)"
            )
        tried = replace(tried, nodes=2 * tried.nodes)
    return f"{MOST_GPUS:,} GPUs would not do either; take GPUs with more memory"
