"""One run in a rank of a world that stays: `loop.train` as it is, watched from outside."""

import contextlib
import hashlib
import json
import signal
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from foundling.train.faults import anomaly
from foundling.config.parallel import ParallelConfig
from foundling.config.run import RunConfig
from foundling.model.loss import IGNORE
from foundling.parallel.mesh import Mesh, make_mesh
from foundling.runtime.dist import world_from_environment
from foundling.runtime.exits import EndOfRun, Exit
from foundling.runtime.processes import handle_signals
from foundling.runtime.run_dir import RunDir
from foundling.train import loop, setup

sys.path.insert(0, str(Path(__file__).parents[1] / "chaos"))

from planted import plant

anomaly.WINDOW = 8  # runs are short here


def train_planted(config: RunConfig, run: Path, order: str) -> None:
    """Train with bad batches among the good ones."""
    world = world_from_environment()
    take_back = plant(order, world.rank, world.size)
    try:
        train_run(config, run)
    finally:
        take_back()


def train_run(config: RunConfig, run: Path, stop_at: int = 0) -> None:
    """Train to the end, or to `stop_at`, where one rank is told to stop by a signal."""
    world, real = world_from_environment(), loop.train_step
    with open(rows_file(run, world.rank), "a", encoding="utf-8") as rows:

        def train_step(state: Any, batches: Any, *rest: Any) -> Any:
            result = real(state, batches, *rest)
            if state.mesh.is_tp_leader:
                line = {"step": state.step, "rows": [row for one in batches for row in hashed(one)]}
                rows.write(json.dumps(line) + "\n")
                rows.flush()
            if state.step == stop_at and world.rank == world.size - 1:
                signal.raise_signal(signal.SIGTERM)
            return result

        loop.train_step = train_step  # type: ignore[assignment]
        try:
            with own_groups(config.parallel), handle_signals():
                loop.train(config, RunDir(run))
        except EndOfRun as end:
            if not (stop_at and end.code == Exit.REQUEUE):
                raise
        finally:
            loop.train_step = real


@contextlib.contextmanager
def own_groups(parallel: ParallelConfig) -> Iterator[None]:
    """End the process groups of a run with it: each is three threads and some sockets, and a
    process of ours has one run in its life. Meshes stay, because torch remembers them."""
    mesh_of(parallel)
    before = groups()
    setup.make_mesh = lambda parallel, world, device: mesh_of(parallel)
    try:
        yield
    finally:
        setup.make_mesh = make_mesh
    if dist.is_initialized():
        dist.barrier()
        for group in groups() - before:
            dist.destroy_process_group(group)


@lru_cache
def mesh_of(parallel: ParallelConfig) -> Mesh:
    """The mesh of a layout, made once in a world."""
    return make_mesh(parallel, world_from_environment(), torch.device("cpu"))


def groups() -> set[dist.ProcessGroup]:
    """Those that there are now."""
    return set(distributed_c10d._world.pg_map)


def rows_file(run: Path, rank: int) -> Path:
    """Where a rank writes down what it has read; beside the run, which is compared."""
    return run.parent / f"{run.name}.rows-{rank}.jsonl"


def hashed(batch: Any) -> list[str]:
    """Each row of a micro-batch, inputs and targets, but those that only fill a shape."""
    return [
        hashlib.sha256(inputs.tobytes() + targets.tobytes()).hexdigest()[:16]
        for inputs, targets in zip(batch.inputs, batch.targets, strict=True)
        if (targets != IGNORE).any()
    ]


def rows_of(run: Path) -> dict[int, list[str]]:
    """The rows that each step of a run has read, over all ranks."""
    found: dict[int, list[str]] = {}
    for path in run.parent.glob(f"{run.name}.rows-*.jsonl"):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            found.setdefault(line["step"], []).extend(line["rows"])
    return {step: sorted(rows) for step, rows in sorted(found.items())}
