"""Seconds that GPUs spend talking, by the collective and the wires it crosses.

A ring all-reduce of S bytes over n ranks moves 2 (n-1)/n S through every rank, a gather or scatter
half of that (Patarasuk and Yuan 2009); within a node over the GPU's link, across nodes through the
node's adapters, which its GPUs share. Every hop waits: gathers and scatters are rings and have as
many hops as ranks, an all-reduce may go up and down a tree instead. Traffic of gradients and
gathered weights hides behind the backward pass up to a stated share; tensor parallelism's lies
between products and hides nowhere.
"""

import math
from dataclasses import dataclass

from foundling.plan.coefficients import COEFFICIENTS as K
from foundling.plan.hardware import Gpu
from foundling.plan.layout import Layout
from foundling.plan.work import Work, sizes_of

BUCKET_BYTES = 25e6
"""Gradients that DDP sums at once."""


@dataclass(frozen=True, kw_only=True)
class Talk:
    """Seconds of communication in one step, before anything is hidden."""

    gradients: float
    """DDP's and HSDP's all-reduce, FSDP's reduce-scatter: hides behind the backward pass."""
    gathers: float
    """FSDP's weights, before each block: hides behind the block before."""
    tensor: float
    """Between products: does not hide."""
    ends: float
    """Of the above, what has nothing to hide behind: the first gather and the last gradients."""


def talk(work: Work, gpu: Gpu) -> Talk:
    """What a step of this layout says to the other GPUs."""
    layout = work.layout
    gradients = gathers = ends = 0.0
    if layout.shard > 1:
        gathers, gradients = _sharded(work, gpu)
        times = (work.model.layers + 1) * work.accumulation
        ends = gathers / (2 * times) + gradients / times
    if layout.replicate > 1:
        summed = _replicated(work, gpu)
        gradients, ends = gradients + summed, ends + summed / _buckets(work)
    return Talk(gradients=gradients, gathers=gathers, tensor=_tensor(work, gpu), ends=ends)


def _sharded(work: Work, gpu: Gpu) -> tuple[float, float]:
    """FSDP: each block's weights gathered forward and backward, its gradients scattered."""
    layout = work.layout
    nodes = _nodes_of_shards(layout)
    speed = gpu.link * K.link_share
    if nodes > 1:
        # One node needs each byte once and passes it on inside, so its adapters work together;
        # tensor-parallel neighbours gather different bytes and share them.
        speed = min(speed, _per_gpu(gpu, layout) * max(1, layout.per_node // layout.tensor))
    once = (layout.shard - 1) / layout.shard * _mine(work) / speed
    wait = (2 * work.model.layers + 2) * ring_s(layout.shard, nodes)
    gathers = work.accumulation * (2 * work.width * once + wait)
    return gathers, work.accumulation * (4 * once + wait / 2)


def _replicated(work: Work, gpu: Gpu) -> float:
    """DDP and HSDP: gradients summed over the replicas, a bucket at a time."""
    layout, ranks = work.layout, work.layout.replicate
    share = 4 * _mine(work) / layout.shard
    speed = gpu.link * K.link_share
    if layout.world > layout.per_node:
        per_gpu = _per_gpu(gpu, layout)
        alone = layout.shard == 1
        speed = min(speed, per_gpu * layout.per_node / layout.tensor) if alone else per_gpu
    # A group has a rank in every node, or in as many as it has ranks.
    nodes = min(ranks, layout.nodes)
    wait = _buckets(work) * all_reduce_s(ranks, nodes)
    return 2 * (ranks - 1) / ranks * share / speed + wait


def _buckets(work: Work) -> float:
    return max(1.0, 4 * _mine(work) / work.layout.shard / BUCKET_BYTES)


def _mine(work: Work) -> float:
    """Parameters that a tensor-parallel rank has a part in."""
    return sizes_of(work.model).all / work.layout.tensor


def _per_gpu(gpu: Gpu, layout: Layout) -> float:
    return gpu.network * K.network_share / layout.per_node


def _nodes_of_shards(layout: Layout) -> int:
    return -(-layout.shard * layout.tensor // layout.per_node)


def _tensor(work: Work, gpu: Gpu) -> float:
    """Two all-reduces a block forward and two backward (Shoeybi et al. 2019), and the forward's
    again where a block is recomputed."""
    degree = work.layout.tensor
    if degree == 1:
        return 0.0
    size = work.width * work.positions * work.model.dim
    times = work.model.layers * (6 if work.recompute == "all" else 4)
    each = 2 * (degree - 1) / degree * size / (gpu.link * K.link_share) + all_reduce_s(degree, 1)
    return work.accumulation * times * each


def ring_s(ranks: int, nodes: int) -> float:
    """Seconds that a gather or scatter waits, beside its bytes: a hop for every other rank, of
    which one a node leaves it."""
    between = nodes - 1
    return K.latency_s + between * K.hop_between_s + (ranks - 1 - between) * K.hop_inside_s


def all_reduce_s(ranks: int, nodes: int) -> float:
    """Seconds that an all-reduce waits: round the ring twice, or up a tree of nodes and down."""
    ring = 2 * ring_s(ranks, nodes) - K.latency_s
    inside = (-(-ranks // nodes) - 1) * K.hop_inside_s
    tree = K.latency_s + 2 * (inside + math.ceil(math.log2(nodes)) * K.hop_between_s)
    return min(ring, tree)
