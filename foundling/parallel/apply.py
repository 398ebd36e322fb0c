"""THE order in which a plain model is made parallel: tensor, float8, recompute, compile, data."""

import contextlib
from collections.abc import Iterator
from typing import TypeGuard

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from foundling.config.errors import ConfigError
from foundling.config.parallel import ParallelConfig, check_tensor
from foundling.config.train import FLOAT8_MULTIPLE, TrainConfig
from foundling.model.transformer import Transformer
from foundling.parallel.compile import compile_model
from foundling.parallel.fsdp import apply_shard
from foundling.parallel.fsdp1 import apply_fsdp1
from foundling.parallel.losses import LossModule
from foundling.parallel.mesh import Mesh
from foundling.parallel.recompute import apply_recompute
from foundling.parallel.tensor_parallel import apply_tensor
from foundling.plan.roofline import is_skipped

# Tensor parallelism cuts the weights the model has. Float8 exchanges the products of what is left.
# Recompute comes next, so that the compiler sees it and places the second run where it costs least.
# Blocks are compiled one by one (seconds, and the same code for each), before FSDP or DDP hooks
# them, so that gathers and buckets overlap with the work between blocks. The model itself never
# learns any of it.

PLAIN = TrainConfig(compile="off")
"""Nothing but the layout."""


def apply_parallel(
    model: Transformer, parallel: ParallelConfig, mesh: Mesh, train: TrainConfig = PLAIN
) -> nn.Module:
    """Wrap `model` for this mesh; the result maps a micro-batch to (loss_sum, token_count)."""
    layout, device = mesh.layout, next(model.parameters()).device
    if layout.tensor > 1:
        check_tensor(model.config, layout.tensor)
        apply_tensor(model, mesh.axis("tensor"))
    if train.float8 != "none":
        apply_float8(model.layers, train, emulate=device.type == "cpu")
        model.head_float8 = train.head_float8
    apply_recompute(model.layers, parallel.recompute, compiled=train.compiles)
    if train.compiles:
        compile_model(model, train)
    module = LossModule(model, train.kernels.loss, train.z_loss)
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
    if parallel.reduce_dtype != "fp32" and device.type == "cpu":
        raise ConfigError(
            f"parallel.reduce_dtype is {parallel.reduce_dtype}, and gloo on a CPU cannot send DDP's"
            " gradients in 16 bits; leave it at fp32."
        )
    wrapped = DistributedDataParallel(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )
    hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
    if parallel.reduce_dtype in hooks:
        wrapped.register_comm_hook(None, hooks[parallel.reduce_dtype])
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


# Float8 products, from torchao: the linear layers of the blocks are exchanged for its own.
#
# Weights stay in fp32 under their names and are scaled anew at every use, so a checkpoint knows
# nothing of it and a resume is exact. The head stays out: its gradient has the widest range, and
# its products are in the loss's own hands. So do products whose sides are no multiples of 16, which
# the hardware does not take.

OLDEST = (8, 9)
"""Compute capability that has float8 products: Ada."""


def apply_float8(blocks: nn.ModuleList, train: TrainConfig, *, emulate: bool = False) -> list[str]:
    """Exchange the products of `blocks`; the names of those that were. `emulate` computes in wider
    numbers what float8 would give, for machines without it."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ConfigError(
            f"train.float8 {train.float8} needs torchao; install it with `pip install"
            " 'foundling[torchao]'`, or leave train.float8 at none."
        ) from error
    recipe = Float8LinearConfig.from_recipe_name(train.float8)
    if emulate:
        object.__setattr__(recipe, "emulate", True)
    chosen: list[str] = []

    def wanted(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear) or not _fits(module):
            return False
        full = f"layers.{name}"
        if is_skipped(full, train.float8_skip):
            return False
        chosen.append(full)
        return True

    convert_to_float8_training(blocks, config=recipe, module_filter_fn=wanted)
    if not chosen:
        raise ConfigError(
            f"train.float8 {train.float8} has no effect: no product of the blocks is left that has"
            f" sides of multiples of {FLOAT8_MULTIPLE}; shorten train.float8_skip, or set float8 to"
            " none."
        )
    return chosen


def check_float8(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a device without float8 products, and other results of them than bf16."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < OLDEST:
        raise ConfigError(
            f"train.float8 needs a GPU with float8 products (compute capability 8.9 or newer), and"
            f" this is {device}; set it to none."
        )
    if dtype != torch.bfloat16:
        raise ConfigError(f"train.float8 needs train.dtype bf16, and it is {dtype}; change one.")


def _fits(module: nn.Linear) -> bool:
    return module.in_features % FLOAT8_MULTIPLE == 0 and module.out_features % FLOAT8_MULTIPLE == 0
