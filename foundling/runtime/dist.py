"""Ranks: who this process is in the job, and the few collectives the house needs.

A job of one process never starts a process group, so the laptop's path has no distributed code in
it. Under torchrun the environment says who we are and we join.
"""

import os
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


def join(world: World, device: torch.device, timeout_s: int = 600) -> None:
    """Start the process group; always with a time limit, so that a lost rank cannot hang a job."""
    if world.size > 1 and not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))


def leave() -> None:
    """End the process group in order; a barrier first, so that no rank pulls the store away."""
    if dist.is_initialized():
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
