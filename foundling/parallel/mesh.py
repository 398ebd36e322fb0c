"""Who holds what and who reads which rows: the ranks of a job as a grid of degrees.

Ranks are numbered replicate first, tensor last, so that tensor-parallel ranks, which communicate
most, are neighbours on one node. Tensor-parallel ranks read the same rows; replicate x shard ranks
read different ones."""

import os
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from foundling.config.parallel import ParallelConfig
from foundling.plan.layout import MeshLayout, lay_out
from foundling.runtime.dist import World

AXES = ("replicate", "shard", "tensor")


@dataclass(frozen=True)
class Mesh:
    """This process's place in the grid."""

    world: World
    layout: MeshLayout
    devices: DeviceMesh | None = None
    """None in a world of one, which starts no process group."""

    @property
    def data(self) -> World:
        """The process as a reader of data: its number among those that read different rows."""
        inner = self.layout.tensor
        return World(
            rank=self.world.rank // inner,
            size=self.layout.data_ranks,
            local_rank=self.world.local_rank,
        )

    @property
    def is_tp_leader(self) -> bool:
        """Whether this process counts its rows: one of those that share them."""
        return self.world.rank % self.layout.tensor == 0

    @property
    def is_sharded(self) -> bool:
        """Whether this process holds only a part of the weights."""
        return self.layout.shard > 1 or self.layout.tensor > 1

    def axis(self, *names: str) -> DeviceMesh:
        """The part of the grid along these axes."""
        assert self.devices is not None
        return self.devices[names]


ALONE = Mesh(World(), MeshLayout())
"""One process."""


def make_mesh(parallel: ParallelConfig, world: World, device: torch.device) -> Mesh:
    """The grid of a job; collective when there is more than one process."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    layout = lay_out(parallel, world.size, max(per_node, parallel.tensor))
    if world.size == 1:
        return Mesh(world, layout)
    shape = (layout.replicate, layout.shard, layout.tensor)
    return Mesh(world, layout, init_device_mesh(device.type, shape, mesh_dim_names=AXES))
