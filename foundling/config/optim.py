"""The section `optim`: how gradients become updates."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from foundling.config.errors import ConfigError, IdleError

if TYPE_CHECKING:
    from foundling.config.parallel import ParallelConfig

ScheduleName = Literal["constant", "linear", "cosine", "quarter-cosine", "wsd"]
OptimizerName = Literal["adamw", "adamw8bit", "muon"]


LONGEST_BLOCK, SHORTEST_BLOCK = 64, 16
"""Numbers of a row that share a scale where moments are kept in 8 bits."""


def block_for(columns: int) -> int:
    """The longest block of a power of two that cuts a row evenly; 0 where only shorter ones than
    are worth their scale do."""
    block = LONGEST_BLOCK
    while columns % block:
        block //= 2
    return block if block >= SHORTEST_BLOCK else 0


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How gradients become updates."""

    name: OptimizerName = "adamw"
    """adamw; adamw8bit (its moments in 8 bits: 2.1 bytes a parameter instead of 8); or muon
    (matrices of the blocks by orthogonalised momentum, the rest by AdamW)."""
    lr: float = 1e-3
    """Peak learning rate."""
    embedding_lr: float = 0.0
    """Peak learning rate of embeddings; 0: lr."""
    head_lr: float = 0.0
    """Peak learning rate of an untied head; 0: lr."""
    vector_lr: float = 0.0
    """Peak learning rate of norms, biases and scalars; 0: lr."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float = 0.95
    """AdamW's decay of the second moment."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    momentum: float = 0.95
    """muon: decay of the momentum (Nesterov's)."""
    muon_scale: Literal["rms", "spectral"] = "rms"
    """muon: size of an update before lr. rms: that of a typical AdamW update, so that AdamW's lr
    and decay can be kept; spectral: norm sqrt(rows / columns), at least 1, whose usual lr is
    0.02."""
    cautious_decay: bool = False
    """muon: decay a weight only where the update pulls it towards zero as well."""
    wide_embedding: bool = False
    """adamw8bit: keep the embeddings' moments in fp32."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; vectors and embeddings are not decayed."""
    clip: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    schedule: ScheduleName = "cosine"
    """Shape of the learning rate after warm-up."""
    warmup_steps: int = 0
    """Steps of linear warm-up (give this or warmup_share)."""
    warmup_share: float = 0.0
    """Warm-up as a share of all steps (give this or warmup_steps)."""
    decay_share: float = 0.2
    """wsd only: share of the steps, at the end, over which the rate falls."""
    final_lr_share: float = 0.0
    """Learning rate at the last step as a share of the peak."""


# Settings of the optimizer that cannot work, or would have no effect.

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


LEAST = 1e-30
