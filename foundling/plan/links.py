"""Seconds that GPUs spend talking, by the collective and the wires it crosses.

A ring all-reduce of S bytes over n ranks moves 2 (n-1)/n S through every rank, a gather or scatter
half of that (Patarasuk and Yuan 2009); within a node over the GPU's link, across nodes through the
node's adapters, which its GPUs share. Traffic of gradients and gathered weights hides behind the
backward pass up to a stated share; tensor parallelism's lies between products and hides nowhere.
"""

import math
from dataclasses import dataclass

from foundling.plan.coefficients import COEFFICIENTS as K
from foundling.plan.hardware import Gpu
from foundling.plan.work import Work, sizes_of


@dataclass(frozen=True, kw_only=True)
class Talk:
    """Seconds of communication in one step, before anything is hidden."""

    gradients: float
    """DDP's and HSDP's all-reduce, FSDP's reduce-scatter: hides behind the backward pass."""
    gathers: float
    """FSDP's weights, before each block: hides behind the block before."""
    tensor: float
    """Between products: does not hide."""


def talk(work: Work, gpu: Gpu) -> Talk:
    """What a step of this layout says to the other GPUs."""
    layout, sizes = work.layout, sizes_of(work.model)
    mine = sizes.all / layout.tensor
    per_gpu = gpu.network * K.network_share / layout.per_node
    gradients = gathers = 0.0
    if layout.shard > 1:
        inside = layout.shard * layout.tensor <= layout.per_node
        # One node needs each byte once and passes it on inside, so its adapters work together;
        # tensor-parallel neighbours gather different bytes and share them.
        speed = gpu.link * K.link_share
        if not inside:
            speed = min(speed, per_gpu * max(1, layout.per_node // layout.tensor))
        once = (layout.shard - 1) / layout.shard * mine / speed
        collectives = 2 * work.model.layers + 2
        wait = collectives * _latency(layout.shard)
        gathers = work.accumulation * (2 * work.width * once + wait)
        gradients = work.accumulation * (4 * once + wait / 2)
    if layout.replicate > 1:
        ranks = layout.replicate
        crosses = layout.world > layout.per_node
        share = 4 * mine / layout.shard
        if not crosses:
            speed = gpu.link * K.link_share
        elif layout.shard == 1:
            speed = min(gpu.link * K.link_share, per_gpu * layout.per_node / layout.tensor)
        else:
            speed = per_gpu
        gradients += 2 * (ranks - 1) / ranks * share / speed
        gradients += max(1.0, share / 25e6) * _latency(ranks)
    return Talk(gradients=gradients, gathers=gathers, tensor=_tensor(work, gpu))


def _tensor(work: Work, gpu: Gpu) -> float:
    """Two all-reduces a block forward and two backward (Shoeybi et al. 2019), and the forward's
    again where a block is recomputed."""
    degree = work.layout.tensor
    if degree == 1:
        return 0.0
    size = work.width * work.positions * work.model.dim
    times = work.model.layers * (6 if work.recompute == "all" else 4)
    each = 2 * (degree - 1) / degree * size / (gpu.link * K.link_share) + _latency(degree)
    return work.accumulation * times * each


def _latency(ranks: int) -> float:
    return K.latency_s * max(1.0, math.log2(max(ranks, 2)))
