"""Whether replicas hold the same weights, bit for bit.

Each rank hashes what it holds of every parameter, on its device; the hashes travel, not the
weights. The hash is a sum of the bytes' words times odd numbers, modulo 2^64: it does not depend on
the order of adding, so a GPU gives the same every time, and one changed word always changes it.
Compared are ranks that must hold the same: those along the replicate axis, and along the tensor
axis what is whole on every rank there. Rejected: comparing norms or sums in floating point, which
differences below their precision slip through.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from foundling.optim.sharded_matrices import local
from foundling.parallel.mesh import Mesh
from foundling.runtime.dist import max_over_ranks
from foundling.runtime.exits import EndOfRun, Exit
from foundling.runtime.progress import collective
from foundling.runtime.run_dir import RunDir

CHUNK = 1 << 20
"""Words hashed at a time: what is made on the way stays small."""
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
HASH_MULTIPLIER = 0x5851F42D4C957F2D


@dataclass(frozen=True)
class Difference:
    """Replicas that do not hold the same."""

    name: str
    """The first parameter that differs."""
    differing_ranks: tuple[int, ...]
    """Ranks that differ from most; empty where there is no most."""
    ranks: tuple[int, ...]

    def describe(self) -> str:
        """In words."""
        if self.differing_ranks:
            named = ", ".join(map(str, self.differing_ranks))
            return f"rank {named} of {list(self.ranks)} has another {self.name} than the others"
        return f"ranks {list(self.ranks)} do not hold the same {self.name}"


def hash_of(tensor: Tensor) -> Tensor:
    """A hash of a tensor's bytes, as one int64 on its device."""
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view(WORDS[flat.element_size()])
    weights = _weights(words.device, CHUNK)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), CHUNK):
        part = words[start : start + CHUNK].to(torch.int64)
        total = total * HASH_MULTIPLIER + (part * weights[: part.numel()]).sum()
    return total


def check_replicas(
    params: Iterable[tuple[str, Tensor]], mesh: Mesh, run: RunDir, step: int
) -> None:
    """End the job where replicas differ, to be started again from the last checkpoint; collective.

    Called before every save, so that no checkpoint is made of replicas that differ.
    """
    found = find_difference(params, mesh)
    if found is None:
        return
    if mesh.world.is_main:
        run.event(
            "replicas_differ",
            step=step,
            differing_ranks=list(found.differing_ranks),
            parameter=found.name,
        )
    raise EndOfRun(
        Exit.CRASH,
        f"at step {step} {found.describe()}: memory or a link of that machine is at fault, or a"
        " rank did not load its weights; the run goes back to its last checkpoint.",
    )


def find_difference(params: Iterable[tuple[str, Tensor]], mesh: Mesh) -> Difference | None:
    """The first difference between any replicas, the same on every rank."""
    held = list(params)
    mine: list[Difference] = []
    for axis in ("replicate", "tensor"):
        if mesh.devices is None or getattr(mesh.layout, axis) < 2:
            continue
        alike = [(name, p) for name, p in held if _is_whole_along(axis, p)]
        mine += [d for d in [_compare(mesh.axis(axis), alike)] if d is not None]
    if mesh.world.size == 1 or not max_over_ranks(int(bool(mine)), name="whether weights differ"):
        return None
    gathered: list[list[Difference] | None] = [None] * mesh.world.size
    with collective("replicas that differ"):
        dist.all_gather_object(gathered, mine)
    return next(found for one in gathered if one for found in one)


def _compare(ranks_of: DeviceMesh, params: Sequence[tuple[str, Tensor]]) -> Difference | None:
    if not params:
        return None
    group = ranks_of.get_group()
    # Offloaded weights are on the host, and the group may be the GPUs'.
    hashes = torch.stack([hash_of(local(p)) for _, p in params]).to(ranks_of.device_type)
    rows = [torch.empty_like(hashes) for _ in range(dist.get_world_size(group))]
    with collective("hashes of the weights"):
        dist.all_gather(rows, hashes, group=group)
    ranks = [dist.get_global_rank(group, number) for number in range(len(rows))]
    return majority_difference([row.tolist() for row in rows], ranks, [name for name, _ in params])


def majority_difference(
    rows: Sequence[Sequence[int]], ranks: Sequence[int], names: Sequence[str]
) -> Difference | None:
    """The ranks whose hashes differ from the majority's, and the first parameter that differs."""
    if all(row == rows[0] for row in rows):
        return None
    usual, count = Counter(tuple(row) for row in rows).most_common(1)[0]
    differing = tuple(rank for rank, row in zip(ranks, rows, strict=True) if tuple(row) != usual)
    first = next(n for n in range(len(names)) if any(row[n] != usual[n] for row in rows))
    return Difference(names[first], differing if 2 * count > len(rows) else (), tuple(ranks))


def _is_whole_along(axis: str, parameter: Tensor) -> bool:
    """Whether every rank of an axis must hold the same of a parameter."""
    if not isinstance(parameter, DTensor):
        return axis == "replicate"  # pieces of torch's first FSDP do not say what they are
    names = parameter.device_mesh.mesh_dim_names or ()
    if axis not in names:
        return axis == "replicate"
    return parameter.placements[names.index(axis)].is_replicate()


@lru_cache
def _weights(device: torch.device, count: int) -> Tensor:
    """An odd number for every place in a chunk, scattered over 64 bits (after splitmix64)."""
    number = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    number = number * -7046029254386353131
    number = (number ^ (number >> 30)) * -4658895280553007687
    number = (number ^ (number >> 27)) * -7723592293110705685
    return number | 1
