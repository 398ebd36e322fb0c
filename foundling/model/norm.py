"""The two norms, with or without learned scale and shift.

Rejected: `torch.nn.LayerNorm` and `torch.nn.RMSNorm`, which agree neither in arguments nor in what
can be left out.

Statistics and scale are computed in fp32 at least, whatever the stream's precision; the result has
the stream's.
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
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight if self.weight is None else self.weight.to(wide)
        return F.rms_norm(x.to(wide), self.shape, weight, self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias."""

    def __init__(self, dim: int, eps: float, *, scaled: bool, shifted: bool) -> None:
        super().__init__()
        self.shape = (dim,)
        self.weight = nn.Parameter(torch.ones(dim)) if scaled else None
        self.bias = nn.Parameter(torch.zeros(dim)) if scaled and shifted else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        weight, bias = (None if p is None else p.to(wide) for p in (self.weight, self.bias))
        return F.layer_norm(x.to(wide), self.shape, weight, bias, self.eps).to(x.dtype)


def make_norm(config: ModelConfig, dim: int) -> nn.Module:
    """The config's norm over the last `dim` numbers."""
    if config.norm == "rms":
        return RMSNorm(dim, config.norm_eps, scaled=config.norm_weight)
    return LayerNorm(dim, config.norm_eps, scaled=config.norm_weight, shifted=config.bias == "all")
