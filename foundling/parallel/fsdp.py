"""FSDP2, and HSDP where there are replicas; weights made in parts on the meta device."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from foundling.config.parallel import ParallelConfig
from foundling.model.initialization import initial_value
from foundling.model.transformer import Transformer
from foundling.parallel.mesh import Mesh

# A block's weights are gathered before its forward pass, given back (parallel.reshard), gathered
# again before its backward pass, and its gradients reduce-scattered after it; with replicas each
# shard's gradients are then summed over them. Every rank of the shard (and replicate) axis must run
# every block, evaluation and sampling included.

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
    for name in ("loss", "states_at", "next_logits"):
        register_fsdp_forward_method(model, name)


def _axes(mesh: Mesh) -> DeviceMesh:
    """Shards alone, or replicas of shards; with tensor parallelism replicas need the second form
    too, because DDP knows no DTensors."""
    if mesh.layout.replicate > 1:
        return mesh.axis("replicate", "shard")
    return mesh.axis("shard")


def _precision(parallel: ParallelConfig, *, of_block: bool) -> MixedPrecisionPolicy:
    """Autocast does the arithmetic, as on one device; this only says how numbers travel."""
    narrow = of_block and parallel.param_dtype != "fp32"
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[parallel.param_dtype] if narrow else None,
        reduce_dtype=DTYPES[parallel.reduce_dtype],
        cast_forward_inputs=False,
    )


# A model that is too large for one process: born in parts.
#
# The model is built without memory (on the meta device), cut, given memory for its own parts, and
# each part is taken out of the value that the whole parameter would have. At no time does a process
# hold more than one whole parameter, and the weights are those of every other layout.


def init_shards(model: Transformer, seed: int) -> None:
    """Give every parameter its initial value, or the part of it that is held here."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = initial_value(name, parameter.shape, model.config, seed)
            copy_shard(parameter, whole)


def copy_shard(parameter: Tensor, whole: Tensor) -> None:
    """Copy into `parameter` what it holds of `whole`."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    # DTensor tells no rank publicly where its part begins.
    shape, offset = compute_local_shape_and_global_offset(
        whole.shape, parameter.device_mesh, parameter.placements
    )
    part = whole[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))]
    parameter.to_local().copy_(part)
