"""THE order in which a plain model is made parallel: tensor, recompute, compile, then data.

Tensor parallelism cuts the weights the model has. Recompute comes next, so that the compiler sees
it and places the second run where it costs least. Blocks are compiled one by one (seconds, and the
same code for each), before FSDP or DDP hooks them, so that gathers and buckets overlap with the
work between blocks. The model itself never learns any of it.
"""

import contextlib
from collections.abc import Iterator
from typing import Literal, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from foundling.config.degrees import check_tensor
from foundling.config.errors import ConfigError
from foundling.config.sections import ParallelConfig
from foundling.model import IGNORE, Transformer
from foundling.parallel.mesh import Mesh
from foundling.parallel.old_fsdp import apply_fsdp1
from foundling.parallel.recompute import apply_recompute
from foundling.parallel.shard import apply_shard
from foundling.parallel.tensor import apply_tensor

LossKind = Literal["fused", "plain"]
MOST_GRAPHS = 64
"""Lengths of rows times kinds of blocks that may be compiled."""


class LossModule(nn.Module):
    """The model seen as a loss: DDP only works through `forward`, and ours must be the loss."""

    def __init__(self, model: Transformer, loss: LossKind = "fused") -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(
        self, tokens: Tensor, targets: Tensor, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(loss_sum, token_count) of one micro-batch."""
        if self.loss == "fused":
            return self.model.loss(tokens, targets, documents)
        return plain_loss(self.model(tokens, documents), targets)


def _compile(blocks: nn.ModuleList) -> None:
    """One graph for each shape of a micro-batch. Left to itself, dynamo answers the second shape
    with graphs for any shape, which are slower, and after eight it quietly runs eagerly: a run
    whose rows grow, or whose batches come in buckets, has several shapes and keeps to them."""
    import torch._dynamo  # seconds, which a run without compilation does not pay

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
    for block in blocks:
        block.compile(dynamic=False)


def plain_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of whole logits [B, T, V], summed in fp32, and the number of counted targets.

    What everyone writes first, kept as the yardstick of the fused loss in memory and in time.
    """
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(wide, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    return total, (targets != IGNORE).sum()


def apply_parallel(
    model: Transformer,
    parallel: ParallelConfig,
    mesh: Mesh,
    *,
    compile_blocks: bool,
    loss: LossKind = "fused",
) -> nn.Module:
    """Wrap `model` for this mesh; the result maps a micro-batch to (loss_sum, token_count)."""
    layout, device = mesh.layout, next(model.parameters()).device
    if layout.tensor > 1:
        check_tensor(model.config, layout.tensor)
        apply_tensor(model, mesh.axis("tensor"))
    apply_recompute(model.layers, parallel.recompute)
    if compile_blocks:
        _compile(model.layers)
    module = LossModule(model, loss)
    if parallel.fsdp1 and layout.shard > 1:
        return apply_fsdp1(module, parallel, mesh, device)
    if layout.shard > 1 or (layout.replicate > 1 and layout.tensor > 1):
        apply_shard(model, parallel, mesh)
    elif layout.replicate > 1:
        return _replicated(module, parallel, device)
    return module


def _replicated(
    module: nn.Module, parallel: ParallelConfig, device: torch.device
) -> DistributedDataParallel:
    """DDP: gradients are averaged bucket by bucket while the backward pass goes on."""
    if parallel.grad_dtype != "fp32" and device.type == "cpu":
        raise ConfigError(
            f"parallel.grad_dtype is {parallel.grad_dtype}, and gloo on a CPU cannot send DDP's"
            " gradients in 16 bits; leave it at fp32."
        )
    wrapped = DistributedDataParallel(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        bucket_cap_mb=parallel.bucket_mb,
    )
    hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
    if parallel.grad_dtype in hooks:
        wrapped.register_comm_hook(None, hooks[parallel.grad_dtype])
    return wrapped


@contextlib.contextmanager
def accumulating(module: nn.Module, *, last: bool) -> Iterator[None]:
    """Around one micro-step: gradients travel between replicas with the last one only.

    Shards reduce theirs every time, because whole gradients kept for later would cost the memory
    that sharding saves.
    """
    if isinstance(module, DistributedDataParallel) and not last:
        with module.no_sync():
            yield
        return
    inner = getattr(module, "model", None)
    if isinstance(inner, FSDPModule):
        inner.set_requires_all_reduce(last)
    yield


@contextlib.contextmanager
def whole_weights(module: nn.Module) -> Iterator[None]:
    """Around calls of the plain model: torch's first FSDP has flattened its weights and must give
    them back for that. Collective; the others need nothing."""
    if is_fsdp1(module):
        with FullyShardedDataParallel.summon_full_params(module, writeback=False):
            yield
        return
    yield


def is_fsdp1(module: nn.Module) -> TypeGuard[FullyShardedDataParallel]:
    """Whether the old wrapper is at work, whose parameters are pieces without a shape."""
    return isinstance(module, FullyShardedDataParallel)
