"""One model under DDP, FSDP1, FSDP2 and HSDP, on the same rows: speed and memory of each layout."""

import gc
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from foundling.bench.batch_size import refuse_unknown
from foundling.config.errors import ConfigError
from foundling.config.parallel import ParallelConfig
from foundling.config.run import RunConfig
from foundling.parallel.mesh import make_mesh
from foundling.plan.supply import known_sizes
from foundling.profiling.step_runner import StepRunner, Timed, random_rows
from foundling.runtime.console import size, table
from foundling.runtime.device import DeviceChoice, prepare_device
from foundling.runtime.dist import barrier, process_group, world_from_environment
from foundling.runtime.processes import ChildResult, run_ranks, tie_to_parent

# Each layout is a job of its own on this machine, in fresh processes, so that none inherits
# another's memory and a layout that dies leaves the rest. The ranks take the trainer's own steps on
# random rows (profiling/step_runner.py). Speed counts only with the loss: all layouts must have
# the same.
#
# Communication is what a step takes beyond the same work without it. The same processes take as
# many rows independently, each with a whole model and no group, side by side on the same cores and
# links to memory: that gives forward and backward. The update is the layout's own, because shards
# divide it. Rejected: adding up the collectives' durations, which counts what overlaps with the
# arithmetic, and one process alone, which has the machine to itself.

LAYOUTS = ("ddp", "fsdp1", "fsdp2", "hsdp")
LEAST = {"ddp": 2, "fsdp1": 2, "fsdp2": 2, "hsdp": 4}
LOSS_GAP = 1e-3
"""Relative, between layouts that read the same rows."""
METHOD = (
    "communication: the share of a step beyond the same forward and backward pass taken by the same"
    " processes side by side without a group, and the layout's own update"
)
Start = Callable[[RunConfig, int], Sequence[ChildResult]]


@dataclass(frozen=True)
class LayoutTiming:
    """One layout."""

    layout: str
    refusal: str = ""
    """Why there are no numbers."""
    tokens_per_s: float = 0.0
    """Of all ranks together."""
    step_s: float = 0.0
    memory: int = 0
    """Bytes that the rank with the most held beyond what its process held before."""
    talk_share: float | None = None
    """Of the step; None where the model does not fit into one process alone."""
    loss: float = 0.0
    """Of the last step."""


def laid_out(layout: str, processes: int, parallel: ParallelConfig) -> ParallelConfig:
    """The config section of a layout; what is not about the layout stays."""
    degrees = {
        "ddp": (processes, 1),
        "fsdp1": (1, processes),
        "fsdp2": (1, processes),
        "hsdp": (2, processes // 2),
    }
    replicas, shard = degrees[layout]
    sizes = parallel.replace(replicate=replicas, shard=shard, tensor=1, fsdp1=layout == "fsdp1")
    return sizes.replace(offload=False, param_dtype="fp32") if layout == "fsdp1" else sizes


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """The layouts that were asked for, or all."""
    refuse_unknown(names, LAYOUTS, "--layouts")
    return tuple(names) or LAYOUTS


def obstacle(layout: str, processes: int) -> str:
    """Why so many processes cannot be laid out this way; empty if they can."""
    least = LEAST[layout]
    if processes < least:
        return (
            f"{layout} needs {least} processes and there are {processes}; give --nproc {least},"
            " with --train.device cpu where there are fewer GPUs."
        )
    if layout == "hsdp" and processes % 2:
        return f"hsdp needs an even number of processes and there are {processes}; give --nproc 4."
    return ""


def bench_parallel(
    config: RunConfig,
    layouts: Sequence[str],
    processes: int,
    *,
    steps: int,
    limit_s: float,
    start: Start | None = None,
) -> Iterator[LayoutTiming]:
    """Measure one layout after the other; each that cannot be measured says why."""
    config, _ = known_sizes(config)
    if not config.model.vocab_size:
        raise ConfigError("model.vocab_size is 0 and no data says it; give --model.vocab-size.")
    if config.train.batch_size < 1:
        raise ConfigError("train.batch_size is left to the plan; give --train.batch-size.")
    go = start or _starter(steps, limit_s)
    for layout in layouts:
        if refusal := obstacle(layout, processes):
            yield LayoutTiming(layout, refusal)
            continue
        laid = config.replace(parallel=laid_out(layout, processes, config.parallel))
        yield result_of(layout, go(laid, processes))


def _starter(steps: int, limit_s: float) -> Start:
    def start(config: RunConfig, processes: int) -> list[ChildResult]:
        given = json.dumps({"config": config.model_dump_json(), "steps": steps, "limit_s": limit_s})
        words = ["-m", "foundling.bench.layouts"]
        return run_ranks(words, processes, limit_s=limit_s, stdin=given)

    return start


def result_of(layout: str, ended: Sequence[ChildResult]) -> LayoutTiming:
    """From what the ranks printed to one line of the table."""
    for rank, one in enumerate(ended):
        if not one.is_good:
            return LayoutTiming(
                layout, f"rank {rank}: {one.reason}; see --limit, or a smaller batch."
            )
    ranks: list[dict[str, Any]] = [json.loads(one.out.splitlines()[-1]) for one in ended]
    # A step lasts as long as its slowest rank; they wait for each other.
    step_s = max(median(rank["step_s"]) for rank in ranks)
    update_s = max(median(rank["optimizer_s"]) for rank in ranks)
    return LayoutTiming(
        layout,
        tokens_per_s=ranks[0]["positions"] / step_s,
        step_s=step_s,
        memory=max(rank["memory"] for rank in ranks),
        talk_share=_talk_share(ranks, step_s, update_s),
        loss=ranks[0]["losses"][-1],
    )


def _talk_share(ranks: Sequence[Mapping[str, Any]], step_s: float, update_s: float) -> float | None:
    """1 - (work without communication) / step; noise can make it negative."""
    if any(rank["alone"] is None for rank in ranks):
        return None
    passes: float = max(
        median(
            whole - update
            for whole, update in zip(
                rank["alone"]["step_s"], rank["alone"]["optimizer_s"], strict=True
            )
        )
        for rank in ranks
    )
    return 1 - (passes + update_s) / step_s


def same_losses(results: Sequence[LayoutTiming]) -> str:
    """A sentence if layouts that read the same rows had different losses; empty if all is well."""
    paid = {one.layout: one.loss for one in results if not one.refusal}
    if len(paid) < 2:
        return ""
    low, high = min(paid.values()), max(paid.values())
    if high - low <= LOSS_GAP * abs(low):
        return ""
    values = ", ".join(f"{layout} {loss:.5f}" for layout, loss in paid.items())
    return f"the layouts do not compute the same: {values}; believe none of these speeds."


def _share(talk: float) -> str:
    """A step cannot take less than its parts: below nothing, the measurement is too coarse."""
    return f"{talk:.1%}" if talk >= 0 else f"below noise of {-talk:.1%}"


def describe_parallel(results: Sequence[LayoutTiming], processes: int, device: str) -> list[str]:
    """The table as text."""
    rows = [["layout", "tokens/s", "step s", "memory a rank", "communication", "loss"]]
    for one in results:
        if not one.refusal:
            share = "-" if one.talk_share is None else _share(one.talk_share)
            numbers = [f"{one.tokens_per_s:,.0f}", f"{one.step_s:.4f}", size(one.memory), share]
            rows.append([one.layout, *numbers, f"{one.loss:.4f}"])
    lines = [f"{processes} processes on {device}"]
    lines += table(rows) if len(rows) > 1 else []
    lines += [f"{one.layout}: {one.refusal}" for one in results if one.refusal]
    memory = "torch's allocator" if device == "cuda" else "resident memory beyond the start"
    return [*lines, METHOD, f"memory: peak of {memory}, of the rank with the most"]


# One rank of `bench train --layouts`: read what to do from stdin, print what it took.


def main() -> None:
    """The layout first, because what comes second finds a memory that was used."""
    tie_to_parent()
    asked = json.loads(sys.stdin.read())
    config = RunConfig.model_validate_json(asked["config"])
    world = world_from_environment()
    choice = prepare_device(config.train, world.local_rank)
    with process_group(world, choice.device, timeout_s=int(asked["limit_s"])):
        mesh = make_mesh(config.parallel, world, choice.device)
        barrier()
        taken = _timed(StepRunner(config, choice, mesh), asked["steps"])
        gc.collect()
        barrier()
    alone = _alone(config, choice, asked["steps"])
    print(json.dumps({**asdict(taken), "alone": asdict(alone) if alone else None}), flush=True)


def _timed(runner: StepRunner, steps: int) -> Timed:
    size = runner.config.train.batch_size
    return runner.timed(random_rows(runner.config), steps, size=size, watch_updates=True)


def _alone(config: RunConfig, choice: DeviceChoice, steps: int) -> Timed | None:
    """The same micro-batch by this process for itself; None where the model does not fit."""
    single = ParallelConfig(recompute=config.parallel.recompute)
    try:
        return _timed(StepRunner(config.replace(parallel=single), choice), steps)
    except torch.OutOfMemoryError:
        return None


if __name__ == "__main__":
    main()
