"""Settings of speed and precision that cannot work together, or would have no effect.

What only the device can tell (a GPU that is missing, a compiler left to `auto`) is refused where it
is known: foundling/train/kernels.py and foundling/parallel.
"""

from typing import TYPE_CHECKING

from foundling.config.errors import ConfigError, IdleError
from foundling.config.recompute import kept_share

if TYPE_CHECKING:
    from foundling.config.sections import RunConfig

FLOAT8_SIDE = 16
"""Of a product, a multiple of which the hardware takes."""


def check_speed(config: "RunConfig") -> None:
    """Refuse what another setting makes idle, and layouts that a way of computing does not know."""
    train, parallel = config.train, config.parallel
    if train.z_loss < 0:
        raise ConfigError(f"train.z_loss cannot be negative (it is {train.z_loss}).")
    if kept_share(parallel.recompute) is not None and train.compile == "off":
        raise ConfigError(
            f"parallel.recompute {parallel.recompute} has no effect while train.compile is off; use"
            " train.compile blocks, or per-op."
        )
    _check_float8(config)
    _check_loss(config)
    if train.compile in ("model", "graphs") and (parallel.shard > 1 or parallel.tensor > 1):
        raise ConfigError(
            f"train.compile {train.compile} knows neither parallel.shard nor parallel.tensor, whose"
            " ranks talk between the blocks; use train.compile blocks."
        )


def _check_float8(config: "RunConfig") -> None:
    train, parallel = config.train, config.parallel
    if train.float8 == "none":
        for name in ("float8_skip", "float8_head"):
            if getattr(train, name):
                remedy = "remove it or choose a kind of float8"
                raise IdleError(f"train.{name}", "while train.float8 is none", remedy)
        return
    if train.float8_head and train.loss != "fused":
        raise ConfigError(
            f"train.float8_head is train.loss fused's, and it is {train.loss}; use fused."
        )
    if train.float8_head and config.model.dim % FLOAT8_SIDE:
        raise ConfigError(
            f"train.float8_head needs model.dim to be a multiple of {FLOAT8_SIDE}, and it is"
            f" {config.model.dim}; leave it off."
        )
    if parallel.tensor > 1 or parallel.fsdp1:
        name = "parallel.tensor" if parallel.tensor > 1 else "parallel.fsdp1"
        raise ConfigError(
            f"train.float8 {train.float8} is not built for {name}; use parallel.shard without it,"
            " or train.float8 none."
        )
    if train.dtype not in ("auto", "bf16"):
        raise ConfigError(
            f"train.float8 {train.float8} needs the rest in bf16, and train.dtype is {train.dtype};"
            " use bf16 or auto."
        )


def _check_loss(config: "RunConfig") -> None:
    train, parallel = config.train, config.parallel
    if train.loss == "torch" and (config.model.logit_softcap or train.z_loss):
        raise ConfigError(
            "train.loss torch knows neither model.logit_softcap nor train.z_loss; use fused."
        )
    if train.loss not in ("torch", "liger"):
        return
    for name in ("shard", "tensor"):
        if getattr(parallel, name) > 1:
            raise ConfigError(
                f"train.loss {train.loss} needs the whole head, and parallel.{name} cuts it; use"
                " fused."
            )
