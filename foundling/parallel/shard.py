"""FSDP2, and HSDP where there are replicas too, one group of weights a block.

A block's weights are gathered before its forward pass, given back (parallel.reshard), gathered
again before its backward pass, and its gradients reduce-scattered after it; with replicas each
shard's gradients are then summed over them. Every rank of the shard (and replicate) axis must run
every block, evaluation and sampling included.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from foundling.config.sections import ParallelConfig
from foundling.model import Transformer
from foundling.parallel.mesh import Mesh

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def apply_shard(model: Transformer, parallel: ParallelConfig, mesh: Mesh) -> None:
    """Shard every block and then the rest of `model`, in place."""
    over = _axes(mesh)
    options: dict[str, Any] = {"mesh": over, "mp_policy": _precision(parallel, of_block=True)}
    if parallel.offload:
        options["offload_policy"] = CPUOffloadPolicy()
    for block in model.layers:
        fully_shard(block, reshard_after_forward=parallel.reshard, **options)
    # What is outside the blocks is needed first and last: it stays gathered in between, in fp32.
    options["mp_policy"] = _precision(parallel, of_block=False)
    fully_shard(model, reshard_after_forward=False, **options)
    _prefetch(list(model.layers), parallel.prefetch)
    for name in ("loss", "decode", "states_at", "judge"):
        register_fsdp_forward_method(model, name)


def _axes(mesh: Mesh) -> DeviceMesh:
    """Shards alone, or replicas of shards; with tensor parallelism replicas need the second form
    too, because DDP knows no DTensors."""
    if mesh.layout.replicate > 1:
        return mesh.axis("replicate", "shard")
    return mesh.axis("shard")


def _precision(parallel: ParallelConfig, *, of_block: bool) -> MixedPrecisionPolicy:
    """Autocast does the arithmetic, as on one device; this only says how numbers travel."""
    narrow = of_block and parallel.gather_dtype != "fp32"
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[parallel.gather_dtype] if narrow else None,
        reduce_dtype=DTYPES[parallel.grad_dtype],
        cast_forward_inputs=False,
    )


def _prefetch(blocks: list[nn.Module], depth: int) -> None:
    """Beyond the one block that FSDP gathers ahead by itself."""
    if depth < 2:
        return
    sharded: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
    for number, block in enumerate(sharded):
        block.set_modules_to_forward_prefetch(sharded[number + 1 : number + 1 + depth])
        block.set_modules_to_backward_prefetch(sharded[max(0, number - depth) : number][::-1])
