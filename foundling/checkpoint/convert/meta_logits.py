"""Logits of a model in Meta's layout, by Meta's formulas on the tensors as they are stored.

Everything else here turns the rows of q and k into our order first, and a mistake in that would be
made on the way in and on the way out alike: the two would agree, and both be wrong. So models in
this layout (Meta's folders, torchtitan's) are run as their own code runs them: neighbours turn
together, and slow rotations are found by their wavelength.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from foundling.checkpoint.convert.forward import Read
from foundling.checkpoint.convert.products import Scratch, by_rows
from foundling.checkpoint.convert.source import Source
from foundling.config import ModelConfig

EMBEDDING = "tok_embeddings.weight"


def is_meta(source: Source) -> bool:
    """Whether its tensors lie as Meta's."""
    return source.places["embed.weight"].name.endswith(EMBEDDING)


def meta_logits(source: Source, rounded: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """Logits [T, V] of tokens [1, T], in fp32 from weights as `rounded` makes them."""
    prefix = source.places["embed.weight"].name.removesuffix(EMBEDDING)
    model, scratch = source.model, Scratch()

    def read(name: str) -> Tensor:
        return rounded(source.stored.read(prefix + name))

    turns = _turns(model, tokens.shape[1])
    with torch.inference_mode():
        x = F.embedding(tokens[0], read(EMBEDDING)).float()
        for layer in range(model.layers):
            x = _block(model, x, turns, partial(_of_layer, read, layer), scratch)
        x = _normed(x, read("norm.weight"), model.norm_eps)
        return by_rows(x, read(EMBEDDING if model.tie_embeddings else "output.weight"), scratch)


def _of_layer(read: Read, layer: int, name: str) -> Tensor:
    return read(f"layers.{layer}.{name}")


def _block(model: ModelConfig, x: Tensor, turns: Tensor, read: Read, scratch: Scratch) -> Tensor:
    def times(y: Tensor, name: str) -> Tensor:
        return by_rows(y, read(f"{name}.weight"), scratch)

    count, width = len(x), model.head_width
    y = _normed(x, read("attention_norm.weight"), model.norm_eps)
    q, k, v = (times(y, f"attention.w{part}").view(count, -1, width) for part in "qkv")
    q, k = _turned(q, turns), _turned(k, turns)
    groups = model.heads // model.num_kv_heads
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(width)
    unseen = torch.ones(count, count, dtype=torch.bool).triu(1)
    seen = scores.masked_fill(unseen, -math.inf).softmax(-1)
    x = x + times(torch.einsum("hqk,khd->qhd", seen, v).flatten(1), "attention.wo")
    y = _normed(x, read("ffn_norm.weight"), model.norm_eps)
    gate = F.silu(times(y, "feed_forward.w1")) * times(y, "feed_forward.w3")
    return x + times(gate, "feed_forward.w2")


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """x [T, heads, D]: numbers 2i and 2i + 1 are one complex number that is turned."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[:, None]).flatten(2)


def _turns(model: ModelConfig, count: int) -> Tensor:
    """Complex numbers of length 1 [T, D / 2]."""
    speeds = [model.rope_theta ** (-i / model.head_width) for i in range(0, model.head_width, 2)]
    if model.rope_scaling != 1:
        speeds = [_slowed(model, speed) for speed in speeds]
    angles = torch.outer(torch.arange(count).double(), torch.tensor(speeds).double())
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def _slowed(model: ModelConfig, speed: float) -> float:
    wavelength = 2 * math.pi / speed
    if wavelength < model.rope_original / model.rope_high:
        return speed
    if wavelength > model.rope_original / model.rope_low:
        return speed / model.rope_scaling
    share = model.rope_original / wavelength - model.rope_low
    kept = share / (model.rope_high - model.rope_low)
    return (1 - kept) * speed / model.rope_scaling + kept * speed
