"""The section `optim`: how gradients become updates."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, model_validator

from foundling.config.base import BelowOne, Section, Share
from foundling.config.errors import ConfigError

ScheduleName = Literal["constant", "linear", "cosine", "quarter-cosine", "wsd"]
OptimizerName = Literal["adamw", "adamw8bit", "muon"]


LEAST = 1e-30
"""Below it, moments in 8 bits are nothing."""
LONGEST_BLOCK, SHORTEST_BLOCK = 64, 16
"""Numbers of a row that share a scale where moments are kept in 8 bits."""


def block_for(columns: int) -> int:
    """The longest block of a power of two that cuts a row evenly; 0 where only shorter ones than
    are worth their scale do."""
    block = LONGEST_BLOCK
    while columns % block:
        block //= 2
    return block if block >= SHORTEST_BLOCK else 0


LEAST_EPS = 1.17e-38
"""What is smaller is no normal number of fp32's, and a GPU may take it for 0."""
ONLY = {
    "momentum": "muon",
    "muon_scale": "muon",
    "cautious_decay": "muon",
    "wide_embedding": "adamw8bit",
}
"""Fields that one optimizer alone reads."""


class OptimConfig(Section):
    """How gradients become updates."""

    where: ClassVar[str] = "optim"

    name: OptimizerName = "adamw"
    """adamw; adamw8bit (its moments in 8 bits: 2.1 bytes a parameter instead of 8); or muon
    (matrices of the blocks by orthogonalised momentum, the rest by AdamW)."""
    lr: NonNegativeFloat = 1e-3
    """Peak learning rate."""
    embedding_lr: NonNegativeFloat = 0.0
    """Peak learning rate of embeddings; 0: lr."""
    head_lr: NonNegativeFloat = 0.0
    """Peak learning rate of an untied head; 0: lr."""
    vector_lr: NonNegativeFloat = 0.0
    """Peak learning rate of norms, biases and scalars; 0: lr."""
    beta1: BelowOne = 0.9
    """AdamW's decay of the first moment."""
    beta2: BelowOne = 0.95
    """AdamW's decay of the second moment."""
    eps: Annotated[float, Field(ge=LEAST_EPS)] = 1e-8
    """AdamW's epsilon."""
    momentum: BelowOne = 0.95
    """muon: decay of the momentum (Nesterov's)."""
    muon_scale: Literal["rms", "spectral"] = "rms"
    """muon: size of an update before lr. rms: that of a typical AdamW update, so that AdamW's lr
    and decay can be kept; spectral: norm sqrt(rows / columns), at least 1, whose usual lr is
    0.02."""
    cautious_decay: bool = False
    """muon: decay a weight only where the update pulls it towards zero as well."""
    wide_embedding: bool = False
    """adamw8bit: keep the embeddings' moments in fp32."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of matrices; vectors and embeddings are not decayed."""
    clip: Annotated[float, Field(ge=0, allow_inf_nan=True)] = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    schedule: ScheduleName = "cosine"
    """Shape of the learning rate after warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up (give this or warmup_share)."""
    warmup_share: Share = 0.0
    """Warm-up as a share of all steps (give this or warmup_steps)."""
    decay_share: Share = 0.2
    """wsd only: share of the steps, at the end, over which the rate falls."""
    final_lr_share: Share = 0.0
    """Learning rate at the last step as a share of the peak."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse settings that cannot work, or that another one makes idle."""
        for name, wanted in ONLY.items():
            if wanted != self.name:
                self.refuse_idle(name, f"with optim.name {self.name}", f"optim.name {wanted}")
        for name in ("embedding_lr", "head_lr", "vector_lr"):
            value = getattr(self, name)
            if value and not self.lr:
                raise ConfigError(
                    f"optim.{name} is {value:g} and optim.lr, whose schedule it follows, is 0; give"
                    " optim.lr."
                )
        if self.warmup_steps and self.warmup_share:
            raise ConfigError(
                "optim.warmup_steps and optim.warmup_share both set the warm-up; give one."
            )
        if self.schedule != "wsd":
            self.refuse_idle("decay_share", f"with optim.schedule {self.schedule}", "wsd")
        if self.schedule == "constant":
            self.refuse_idle("final_lr_share", "with optim.schedule constant", "another schedule")
        return self
