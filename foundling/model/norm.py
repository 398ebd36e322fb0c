"""The two norms, with or without learned scale and shift.

Rejected: `torch.nn.LayerNorm` and `torch.nn.RMSNorm`, which agree neither in arguments nor in what
can be left out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundling.config import ModelConfig


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, dim: int, eps: float, *, scaled: bool = True) -> None:
        super().__init__()
        self.shape = (dim,)
        self.weight = nn.Parameter(torch.ones(dim)) if scaled else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # Queries and keys come in autocast's precision, and the fused kernel wants one for both.
        weight = self.weight if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, self.shape, weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias."""

    def __init__(self, dim: int, eps: float, *, scaled: bool, shifted: bool) -> None:
        super().__init__()
        self.shape = (dim,)
        self.weight = nn.Parameter(torch.ones(dim)) if scaled else None
        self.bias = nn.Parameter(torch.zeros(dim)) if scaled and shifted else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


def make_norm(config: ModelConfig, dim: int) -> nn.Module:
    """The config's norm over the last `dim` numbers."""
    if config.norm == "rms":
        return RMSNorm(dim, config.norm_eps, scaled=config.norm_weight)
    return LayerNorm(dim, config.norm_eps, scaled=config.norm_weight, shifted=config.bias == "all")
