"""torch's first FSDP as a thin strategy: only for comparing with runs that were made with it.

It flattens a block's weights into one vector, so its parameters are pieces without a shape and a
checkpoint has to go through torch's own translation, there and back. Everything else is FSDP2's
business (fsdp.py).
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from foundling.config.errors import ConfigError
from foundling.config.parallel import ParallelConfig
from foundling.model.transformer import Block
from foundling.parallel.fsdp import DTYPES
from foundling.parallel.mesh import Mesh

WRAPPER = "_fsdp_wrapped_module."
PREFIX = "model."
"""Of the model inside the module that is wrapped."""


def apply_fsdp1(
    module: nn.Module, parallel: ParallelConfig, mesh: Mesh, device: torch.device
) -> FullyShardedDataParallel:
    """Wrap the whole module, each block a unit of its own."""
    layout = mesh.layout
    if layout.tensor > 1 or parallel.offload or parallel.param_dtype != "fp32":
        raise ConfigError(
            "parallel.fsdp1 is only for comparison and knows neither tensor, offload nor"
            " param_dtype; leave it off to use them."
        )
    hybrid = layout.replicate > 1
    # The enum's public members leave out one of the four ways that it knows.
    strategies = {
        (False, True): ShardingStrategy.FULL_SHARD,
        (False, False): ShardingStrategy.SHARD_GRAD_OP,
        (True, True): ShardingStrategy.HYBRID_SHARD,
        (True, False): ShardingStrategy._HYBRID_SHARD_ZERO2,
    }
    return FullyShardedDataParallel(
        module,
        device_mesh=mesh.axis("replicate", "shard") if hybrid else mesh.axis("shard"),
        sharding_strategy=strategies[hybrid, parallel.reshard],
        auto_wrap_policy=partial(lambda_auto_wrap_policy, lambda_fn=_is_block),
        mixed_precision=MixedPrecision(reduce_dtype=DTYPES[parallel.reduce_dtype]),
        device_id=device if device.type == "cuda" else torch.device("cpu"),
        use_orig_params=True,
    )


def _is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def clean_params(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by the names that the plain model gives them."""
    for name, parameter in model.named_parameters():
        yield name.replace(WRAPPER, ""), parameter


def read_state(
    module: FullyShardedDataParallel, optimizer: torch.optim.Optimizer, moments: tuple[str, ...]
) -> dict[str, Tensor]:
    """Weights and moments as sharded tensors by the plain model's names."""
    weights: Any = get_model_state_dict(module)
    found = {f"model.{name.removeprefix(PREFIX)}": tensor for name, tensor in weights.items()}
    states: Any = get_optimizer_state_dict(module, optimizer)["state"]
    for name, state in states.items():
        for moment in moments:
            found[f"optim.{name.removeprefix(PREFIX)}.{moment}"] = state[moment]
    return found


def write_state(
    module: FullyShardedDataParallel,
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, Tensor],
    moments: tuple[str, ...],
    step: int,
) -> None:
    """Put tensors that `read_state` gave, and a checkpoint filled, back where they belong."""
    options = StateDictOptions(strict=True)
    weights: Any = {
        PREFIX + name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
        if name.startswith("model.")
    }
    set_model_state_dict(module, weights, options=options)
    whole: Any = get_optimizer_state_dict(module, optimizer)
    for name, state in whole["state"].items():
        for moment in moments:
            state[moment] = tensors[f"optim.{name.removeprefix(PREFIX)}.{moment}"]
        state["step"] = torch.tensor(float(step))
    set_optimizer_state_dict(module, optimizer, whole, options=options)
