"""Which GPU does what: the mesh of a run, from its degrees and the machines it is planned for.

The ranks that see different data are replicate x shard; tensor-parallel ranks share theirs. One
account trained N times the tokens on N GPUs because this was guessed, so tokens per step come from
here and from nowhere else.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from foundling.config.errors import ConfigError
from foundling.config.model import ModelConfig
from foundling.config.parallel import ParallelConfig, tensor_parallel_problem
from foundling.plan.hardware import Gpu


@dataclass(frozen=True, kw_only=True)
class MeshLayout:
    """Degrees of parallelism, all of them named, over so many GPUs of a node."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    per_node: int = 8

    @property
    def world(self) -> int:
        return self.replicate * self.shard * self.tensor

    @property
    def data_ranks(self) -> int:
        """Ranks that read different rows."""
        return self.replicate * self.shard

    @property
    def nodes(self) -> int:
        return -(-self.world // self.per_node)

    def __str__(self) -> str:
        return f"replicate {self.replicate} x shard {self.shard} x tensor {self.tensor}"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What would be rented: so many nodes of so many GPUs of one kind."""

    gpu: Gpu
    per_node: int
    nodes: int

    @property
    def world(self) -> int:
        return self.per_node * self.nodes

    @property
    def dollars_per_hour(self) -> float | None:
        return None if self.gpu.price is None else self.gpu.price * self.world


def machine_for(gpu: Gpu, parallel: ParallelConfig, gpus: int | None, nodes: int | None) -> Machine:
    """The machines that were named, or the fewest on which the config's own degrees fit."""
    if gpus is None and nodes is None:
        world = (parallel.replicate or 1) * parallel.shard * parallel.tensor
        per_node = min(world, gpu.per_node)
        return Machine(gpu=gpu, per_node=per_node, nodes=-(-world // per_node))
    return Machine(gpu=gpu, per_node=gpus or gpu.per_node, nodes=nodes or 1)


def lay_out(parallel: ParallelConfig, world: int, per_node: int = 8) -> MeshLayout:
    """The mesh of `world` processes; replicate 0 takes whatever shard and tensor leave."""
    inner = parallel.shard * parallel.tensor
    if world % inner:
        raise ConfigError(
            f"parallel.shard {parallel.shard} x parallel.tensor {parallel.tensor} does not divide"
            f" {world} processes; change a degree or the number of processes."
        )
    replicate = parallel.replicate or world // inner
    if replicate * inner != world:
        raise ConfigError(
            f"parallel.replicate {replicate} x shard {parallel.shard} x tensor {parallel.tensor} is"
            f" {replicate * inner} and the job has {world} processes; leave replicate at 0."
        )
    if parallel.tensor > per_node:
        raise ConfigError(
            f"parallel.tensor is {parallel.tensor} and a node has {per_node} processes; tensor"
            " parallelism over the network would wait more than it computes, so lower it."
        )
    return MeshLayout(
        replicate=replicate, shard=parallel.shard, tensor=parallel.tensor, per_node=per_node
    )


def counted_ranks(parallel: ParallelConfig, gpus: int | None, nodes: int | None) -> int:
    """Data-parallel ranks without a named GPU: of the GPUs that were counted, or of the config."""
    if gpus or nodes:
        per_node = gpus or 8
        return lay_out(parallel, per_node * (nodes or 1), per_node).data_ranks
    return (parallel.replicate or 1) * parallel.shard


def layouts_of(model: ModelConfig, machine: Machine, tensor: int) -> Iterator[MeshLayout]:
    """Every layout of all GPUs with this tensor degree but plain replicas; none where the model
    cannot be cut so."""
    per_node, world = machine.per_node, machine.world
    if per_node % tensor or tensor_parallel_problem(model, tensor):
        return
    powers = {1 << i for i in range(9)}
    for shard in sorted(powers | {per_node // tensor, world // tensor}):
        if shard * tensor > 1 and world % (shard * tensor) == 0:
            replicate = world // (shard * tensor)
            yield MeshLayout(replicate=replicate, shard=shard, tensor=tensor, per_node=per_node)


def with_layout(parallel: ParallelConfig, layout: MeshLayout) -> ParallelConfig:
    """The config section that asks for this layout, whatever the number of GPUs."""
    return parallel.replace(shard=layout.shard, tensor=layout.tensor)
