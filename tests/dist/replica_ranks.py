"""What each of four ranks does in test_replica_ranks.py; a wrong answer ends it with an error."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from foundling.config.model import ModelConfig
from foundling.config.parallel import ParallelConfig
from foundling.model.transformer import Transformer
from foundling.model.initialization import init_weights
from foundling.parallel.apply import apply_parallel
from foundling.parallel.mesh import make_mesh
from foundling.runtime.run_dir import RunDir
from foundling.runtime.dist import World
from foundling.runtime.dist import combine_on_main
from foundling.runtime.dist import process_group
from foundling.runtime.dist import world_from_environment
from foundling.runtime.processes import defer_signals, handle_signals, stop_requested
from foundling.train.evaluation import NonFatal
from foundling.train.faults.replicas import find_difference

MODEL = ModelConfig(vocab_size=64, dim=16, layers=2, heads=4, ffn_dim=32, tie_embeddings=False)
CPU = torch.device("cpu")


Case = tuple[dict[str, int], int, str, tuple[int, ...]]
"""A layout, the rank that goes wrong, its parameter, and who may be named for it."""


def replicas(cases: dict[str, Case]) -> None:
    """One bit of one parameter of one rank is flipped: every rank must hear of it, and of nothing
    before it."""
    world = world_from_environment()
    torch.set_num_threads(1)
    with process_group(world, CPU, timeout_s=60):
        for case in cases.values():
            flip(world, *case)


def flip(world: World, layout: dict[str, int], rank: int, name: str, odd: tuple[int, ...]) -> None:
    mesh = make_mesh(ParallelConfig(**layout), world, CPU)
    model = Transformer(MODEL)
    init_weights(model, 1)
    apply_parallel(model, ParallelConfig(**layout), mesh)
    assert find_difference(model.named_parameters(), mesh) is None
    if world.rank == rank:
        parameter = dict(model.named_parameters())[name]
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local.detach().view(-1).view(torch.int32)[-1] ^= 1
    found = find_difference(model.named_parameters(), mesh)
    if not odd:
        assert found is None, found
        return
    assert found is not None
    assert found.name == name, found
    assert rank in found.ranks, found
    assert (found.differing_ranks or odd) == odd, found


def attempts(folder: Path) -> None:
    """Rank 1 cannot read the third item: no rank goes on with it, and training goes on."""
    world = world_from_environment()
    with process_group(world, CPU, timeout_s=60):
        tries = NonFatal(RunDir(folder), collective=True, limit_s=30)
        used: list[int] = []

        def evaluate() -> None:
            for item in tries.same_on_all_ranks(items(world)):
                used.append(item)
                both = torch.ones(())
                torch.distributed.all_reduce(both)  # what a model in parts would do
                assert both == world.size

        tries.attempt("evaluation", 5, evaluate)
        assert used == [0, 1]
        tries.attempt("sampling", 5, lambda: used.append(7))
        assert used == [0, 1, 7]

        def fails_on_two() -> None:
            if world.rank == 2:
                raise MemoryError("too large")

        tries.attempt("evaluation", 6, fails_on_two)


def items(world: World) -> Iterator[int]:
    for number in range(4):
        if (world.rank, number) == (1, 2):
            raise OSError("no such file")
        yield number


def stops(folder: Path) -> None:
    """Rank 0 alone knows SLURM's limit, which comes in the middle of shared work: every rank stops
    there, and nothing has failed."""
    world = world_from_environment()
    with contextlib.ExitStack() as stack:
        stack.enter_context(process_group(world, CPU, timeout_s=60))
        os.environ["SLURM_JOB_END_TIME"] = str(time.time() + 8)
        stack.enter_context(handle_signals())
        defer_signals()
        alone = NonFatal(RunDir(folder), collective=False, limit_s=30)
        together = NonFatal(RunDir(folder), collective=True, limit_s=30)
        assert stop_requested(world) is None

        def share() -> None:
            for _ in range(200):
                alone.raise_if_stopping()
                time.sleep(0.05)

        together.attempt("tasks", 5, lambda: combine_on_main(share, lambda _: None))
        assert time.time() < float(os.environ["SLURM_JOB_END_TIME"])
