"""Initial weights: a function of (seed, parameter name, shape) and of nothing else.

Each parameter has its own generator, keyed by a hash of the seed and its name, and is drawn on the
CPU: the order of construction, the device and the layout over processes cannot change a value.
Rejected: one global generator, where a new layer or a skipped parameter shifts all that follow.

Matrices are N(0, 1/sqrt(fan_in)); those that write into the residual stream (attn.o, ffn.down)
dim^-0.5 / sqrt(2 layers), so that the stream's variance does not grow with depth; the embedding
`init_std`. The final norm leaves a hidden state of mean square one, so the logits have variance
s^2 = C * std(head)^2 and the first loss is ln(V) + s^2 / 2.
"""

import hashlib

import torch
from torch import nn

from foundling.config import ModelConfig
from foundling.model.transformer import Transformer


def init_weights(model: Transformer, seed: int) -> None:
    """Fill every parameter in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill(name, parameter, model.config, seed)


def weight_std(name: str, shape: torch.Size, config: ModelConfig) -> float:
    """Standard deviation that a matrix starts with."""
    if name == "embed.weight":
        return config.init_std
    if name.endswith(("attn.o.weight", "ffn.down.weight")):
        return float((config.dim * 2 * config.layers) ** -0.5)
    return float(shape[1] ** -0.5)


def _fill(name: str, parameter: nn.Parameter, config: ModelConfig, seed: int) -> None:
    if parameter.dim() == 1:
        parameter.fill_(1.0)
        return
    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8]
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
    values = torch.randn(parameter.shape, generator=generator)
    parameter.copy_(values * weight_std(name, parameter.shape, config))
