"""The section `optim`: how gradients become updates."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from foundling.config.base import BelowOne, Section, Share
from foundling.config.errors import ConfigError

ScheduleName = Literal["constant", "linear", "cosine", "quarter-cosine", "wsd"]
OptimizerName = Literal["adamw", "adamw8bit", "muon"]
LrPart = Literal["embedding", "head", "vector"]


MIN_MOMENT = 1e-30
"""Below it, moments in 8 bits are nothing."""
MAX_BLOCK_SIZE, MIN_BLOCK_SIZE = 64, 16
"""Numbers of a row that share a scale where moments are kept in 8 bits."""


def moment_block_size(columns: int) -> int:
    """The longest block of a power of two that cuts a row evenly; 0 where only shorter ones than
    are worth their scale do."""
    block = MAX_BLOCK_SIZE
    while columns % block:
        block //= 2
    return block if block >= MIN_BLOCK_SIZE else 0


_MIN_EPS = 1.17e-38
"""What is smaller is no normal number of fp32's, and a GPU may take it for 0."""
_OPTIMIZER_OF_FIELD = {
    "momentum": "muon",
    "muon_scale": "muon",
    "cautious_decay": "muon",
    "wide_embedding": "adamw8bit",
}
"""Fields that one optimizer alone reads."""


class OptimConfig(Section):
    """How gradients become updates."""

    section_name: ClassVar[str] = "optim"

    name: OptimizerName = "adamw"
    """adamw, adamw8bit (its moments in 8 bits: 2.1 bytes a parameter instead of 8) or muon
    (matrices of the blocks by orthogonalised momentum, the rest by AdamW)."""
    lr: NonNegativeFloat = 1e-3
    """Peak learning rate."""
    lr_of: dict[LrPart, PositiveFloat] = Field(default={})
    """Peak learning rates of embedding, head (untied) and vector (norms, biases, scalars) where
    they differ from lr."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """AdamW's decays of the first and the second moment."""
    eps: Annotated[float, Field(ge=_MIN_EPS)] = 1e-8
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
    warmup: NonNegativeFloat = 0.0
    """Linear warm-up: below 1 a share of all steps, from 1 on a number of steps."""
    decay_share: Share = 0.2
    """wsd only: share of the steps, at the end, over which the rate falls."""
    final_lr_share: Share = 0.0
    """Learning rate at the last step as a share of the peak."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse settings that cannot work, or that have no effect with another one."""
        for name, wanted in _OPTIMIZER_OF_FIELD.items():
            if wanted != self.name:
                self.refuse_unused(name, f"with optim.name {self.name}", f"optim.name {wanted}")
        if self.lr_of and not self.lr:
            part, value = next(iter(self.lr_of.items()))
            raise ConfigError(
                f"optim.lr_of.{part} is {value:g} and optim.lr, whose schedule it follows, is 0;"
                " give optim.lr."
            )
        if self.warmup > 1 and not self.warmup.is_integer():
            raise ConfigError(
                f"optim.warmup is a share below 1 or a whole number of steps, not {self.warmup:g}."
            )
        if self.schedule != "wsd":
            self.refuse_unused("decay_share", f"with optim.schedule {self.schedule}", "wsd")
        if self.schedule == "constant":
            self.refuse_unused("final_lr_share", "with optim.schedule constant", "another schedule")
        return self
