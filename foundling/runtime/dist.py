"""Ranks: who this process is in the job, and the few collectives the house needs.

A job of one process never starts a process group, so the laptop's path has no distributed code in
it. Under torchrun the environment says who we are and we join.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from foundling.runtime.pulse import collective

FLIGHT_ENTRIES = "2000"
"""Collectives that torch's flight recorder remembers."""


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
    # The recorder is off by default, and only looks here when the group begins.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", FLIGHT_ENTRIES)
    if device.type == "cuda":
        # Object collectives use the current device, which would be cuda:0 on every rank.
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=limit, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=limit)
    yield
    barrier("the end")
    dist.destroy_process_group()


def sum_over_ranks(tensor: torch.Tensor, name: str = "sum") -> torch.Tensor:
    """Add `tensor` over all ranks, in place; a world of one returns it as it is. `name` is what the
    watchdog calls it."""
    if dist.is_initialized():
        with collective(name):
            dist.all_reduce(tensor)
    return tensor


def barrier(name: str = "barrier") -> None:
    """Wait for every rank."""
    if dist.is_initialized():
        with collective(name):
            dist.barrier()


def flight_record() -> dict[str, bytes]:
    """What torch's flight recorder remembers of the last collectives, by the name of a file to keep
    it in: JSON for people, and NCCL's own form for torch's analyser (torchfrtrace)."""
    from torch._C import _distributed_c10d as c10d

    found: dict[str, bytes] = {}
    for name, function in (
        ("gloo.json", "_dump_fr_trace_json"),
        ("nccl.json", "_dump_nccl_trace_json"),
        ("nccl.trace", "_dump_nccl_trace"),
    ):
        dump = getattr(c10d, function, None)  # which ones there are differs from build to build
        if dump is not None:
            with contextlib.suppress(Exception):
                data = dump()
                found[name] = data.encode() if isinstance(data, str) else bytes(data)
    return {name: data for name, data in found.items() if _has_entries(name, data)}


def _has_entries(name: str, data: bytes) -> bool:
    if not name.endswith(".json"):
        return bool(data)
    try:
        return bool(json.loads(data).get("entries"))
    except ValueError:
        return False
