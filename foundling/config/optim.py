"""The section `optim`: how gradients become updates."""

from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["constant", "linear", "cosine", "quarter-cosine", "wsd"]


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How gradients become updates."""

    lr: float = 1e-3
    """Peak learning rate."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float = 0.95
    """AdamW's decay of the second moment."""
    eps: float = 1e-8
    """AdamW's epsilon."""
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
