"""Float8 products, from torchao: the linear layers of the blocks are exchanged for its own.

Weights stay in fp32 under their names and are scaled anew at every use, so a checkpoint knows
nothing of it and a resume is exact. The head stays out: its gradient has the widest range, and its
products are in the loss's own hands. So do products whose sides are no multiples of 16, which the
hardware does not take.
"""

import torch
from torch import nn

from foundling.config.errors import ConfigError
from foundling.config.sections import TrainConfig
from foundling.config.speed_checks import FLOAT8_SIDE
from foundling.plan.float8 import is_skipped

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
            f" sides of multiples of {FLOAT8_SIDE}; shorten train.float8_skip, or set it to none."
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
    return module.in_features % FLOAT8_SIDE == 0 and module.out_features % FLOAT8_SIDE == 0
