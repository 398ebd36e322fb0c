"""Ranks: who this process is in the job, and the few collectives the house needs.

A job of one process never starts a process group, so the laptop's path has no distributed code in
it. Under torchrun the environment says who we are and we join.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """This process's place in the job."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def world_from_environment() -> World:
    """What torchrun says, or a world of one."""
    if "RANK" not in os.environ:
        return World()
    return World(
        rank=int(os.environ["RANK"]),
        size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
    )


@contextlib.contextmanager
def joined(world: World, device: torch.device, timeout_s: int = 1800) -> Iterator[None]:
    """Be part of the process group, with a time limit, so that a lost rank cannot hang a job.

    The end is in order: a barrier, so that no rank pulls the store away under another. After an
    error there is none: the other ranks are in some other collective and would wait for ours.
    """
    if world.size == 1 or dist.is_initialized():
        yield
        return
    limit = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        # Object collectives use the current device, which would be cuda:0 on every rank.
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=limit, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=limit)
    yield
    dist.barrier()
    dist.destroy_process_group()


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Add `tensor` over all ranks, in place; a world of one returns it as it is."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def barrier() -> None:
    """Wait for every rank."""
    if dist.is_initialized():
        dist.barrier()
