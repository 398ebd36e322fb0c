"""What the plan foresees for a run on the devices it has been given, and whether it keeps to it.

Only where there is something to rest on: a GPU of the table, or a device whose ceilings were
measured (`foundling plan TARGET --probe`). A guess about an unmeasured CPU would only cry wolf.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch

from foundling.config.sections import RunConfig
from foundling.plan.hardware import Gpu, find_gpu, name_of_device
from foundling.plan.horizon import Horizon
from foundling.plan.layout import lay_out
from foundling.plan.memory import plan_memory
from foundling.plan.saving import plan_saving
from foundling.plan.speed import plan_speed
from foundling.plan.wall import compile_s, plan_wall, start_s
from foundling.plan.words import size
from foundling.plan.work import Work, works_of
from foundling.runtime.dist import World
from foundling.train.ceilings import device_name

TOLERANCE = 0.15
ASIDE = ("evaluation", "sampling")
"""Moments of the plan whose peak a run keeps apart from training's."""


def foreseen(
    config: RunConfig, device: torch.device, world: World, horizon: Horizon
) -> dict[str, float]:
    """Seconds until the run is under way; where the device is known those of a step and of the
    whole run, by part, too, and on CUDA bytes at the peak."""
    gpu, mode = known_device(device), str(config.train.compile)
    if gpu is None:
        return {"start_s": start_s(device.type), "compile_s": compile_s(device.type, mode)}
    works = works_of(config, lay_out(config.parallel, world.size, _per_node(gpu, world)), gpu)
    seconds = [plan_speed(work, gpu).step_s for work in works]
    found = {"step_s": seconds[0], **seconds_by_part(config, device, world, horizon, seconds)}
    if device.type == "cuda":
        found["memory_peak"] = max(_training_peak(work, gpu) for work in works)
    return found


def seconds_by_part(
    config: RunConfig,
    device: torch.device,
    world: World,
    horizon: Horizon,
    step_seconds: Sequence[float],
) -> dict[str, float]:
    """The whole run by part, from the seconds of a step in each phase."""
    nodes = lay_out(config.parallel, world.size, _per_node(known_device(device), world)).nodes
    saving = plan_saving(config, ranks=world.size, nodes=nodes, step_s=step_seconds[0])
    return asdict(plan_wall(config, horizon, step_seconds, saving, device=device.type))


def _per_node(gpu: Gpu | None, world: World) -> int:
    """Processes on a CPU are neighbours, however few a node is planned with."""
    return gpu.per_node if gpu is not None and gpu.name != "cpu" else world.size


def _training_peak(work: Work, gpu: Gpu) -> float:
    """The run's own peak: evaluation has another, which is told apart (train/clock.py)."""
    moments = plan_memory(work, gpu).moments
    return max(sum(parts.values()) for name, parts in moments.items() if name not in ASIDE)


def known_device(device: torch.device) -> Gpu | None:
    """The table's entry for this device, if a prediction can rest on it."""
    if device.type == "cuda":
        name = name_of_device(device_name(device))
        return find_gpu(name) if name else None
    cpu = find_gpu("cpu") if device.type == "cpu" else None
    return cpu if cpu and cpu.ceilings else None


def beside_plan(predicted: Mapping[str, float], measured: Mapping[str, float]) -> list[str]:
    """Each figure that was planned beside what came of it, a line each."""
    lines = []
    for name, what in {"step_s": "a step", "memory_peak": "the peak of memory"}.items():
        planned, found = predicted.get(name) or 0, measured.get(name)
        if planned and found is not None:
            said = [size(v) if name == "memory_peak" else f"{v:.4g} s" for v in (planned, found)]
            off = f"{found / planned - 1:+.0%}"
            lines.append(f"{what} was planned at {said[0]} and is {said[1]} ({off})")
    return lines


def overruns(predicted: Mapping[str, float], measured: Mapping[str, float]) -> list[str]:
    """A sentence for each figure that is more than planned by more than the tolerance."""
    told = {
        "step_s": ("slower", "a step takes", "s"),
        "memory_peak": ("larger", "it holds", "bytes"),
    }
    return [
        f"the run is {found / planned - 1:.0%} {word} than planned: {verb} {found:,.4g} {unit} and"
        f" {planned:,.4g} were planned; `foundling plan TARGET --probe` says where."
        for name, (word, verb, unit) in told.items()
        if (planned := predicted.get(name) or 0)
        and (found := measured.get(name, 0)) > planned * (1 + TOLERANCE)
    ]
