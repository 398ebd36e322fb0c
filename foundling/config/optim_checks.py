"""Settings of the optimizer that cannot work, or would have no effect."""

from dataclasses import fields
from typing import TYPE_CHECKING

from foundling.config.errors import ConfigError, IdleError

if TYPE_CHECKING:
    from foundling.config.optim import OptimConfig
    from foundling.config.sections import ParallelConfig

ONLY = {
    "momentum": "muon",
    "muon_scale": "muon",
    "cautious_decay": "muon",
    "wide_embedding": "adamw8bit",
}
"""Fields that one optimizer alone reads."""


def check_optim(optim: "OptimConfig", parallel: "ParallelConfig") -> None:
    """Refuse a setting that another one makes idle, and a layout that hides the matrices."""
    for field in fields(optim):
        wanted = ONLY.get(field.name, optim.name)
        if wanted != optim.name and getattr(optim, field.name) != field.default:
            when, remedy = f"with optim.name {optim.name}", f"remove it or use optim.name {wanted}"
            raise IdleError(f"optim.{field.name}", when, remedy)
    for name in ("embedding_lr", "head_lr", "vector_lr"):
        value = getattr(optim, name)
        if value < 0:
            raise ConfigError(f"optim.{name} cannot be negative (it is {value}).")
        if value and not optim.lr:
            raise ConfigError(
                f"optim.{name} is {value:g} and optim.lr, whose schedule it follows, is 0; give"
                " optim.lr."
            )
    if not 0 <= optim.momentum < 1:
        raise ConfigError(f"optim.momentum is a share below 1 (it is {optim.momentum}).")
    if parallel.fsdp1 and optim.name != "adamw":
        raise ConfigError(
            f"parallel.fsdp1 flattens the weights, and optim.name {optim.name} needs their rows and"
            " columns; leave parallel.fsdp1 off."
        )
