"""The same function written a second time: one position, one head, one layer at a time, in float64.

Nothing here is shared with `foundling.model` but the names of the parameters.
"""

import math

import torch
from torch import Tensor

from foundling.config.model import ModelConfig

Weights = dict[str, Tensor]


def slow_logits(weights: Weights, config: ModelConfig, tokens: list[int]) -> Tensor:
    """Logits [T, V] of one row."""
    stream = []
    for place, token in enumerate(tokens):
        x = weights["embed.weight"][token]
        if config.positions != "rotary":
            x = x + weights["positions.weight"][place]
        stream.append(_norm(weights, config, "embed_norm", x) if config.embed_norm else x)
    begun = list(stream)
    for layer in range(config.layers):
        name = f"layers.{layer}."
        if config.residual_scales:
            keep, back = weights[name + "mix"]
            stream = [keep * x + back * x0 for x, x0 in zip(stream, begun, strict=True)]
        mixed = _attention(weights, config, layer, stream, tokens)
        stream = [x + y for x, y in zip(stream, mixed, strict=True)]
        stream = [x + _feed_forward(weights, config, name, x) for x in stream]
    head = weights["embed.weight" if config.tie_embeddings else "head.weight"]
    logits = torch.stack([head @ _norm(weights, config, "norm", x) for x in stream])
    if config.logit_softcap:
        return config.logit_softcap * torch.tanh(logits / config.logit_softcap)
    return logits


def _attention(
    weights: Weights, config: ModelConfig, layer: int, stream: list[Tensor], tokens: list[int]
) -> list[Tensor]:
    name, width = f"layers.{layer}.attn", config.head_width
    queries, keys, values = [], [], []
    for place, (x, token) in enumerate(zip(stream, tokens, strict=True)):
        x = _norm(weights, config, f"layers.{layer}.attn_norm", x)
        q, k, v = (_heads(_linear(weights, f"{name}.{part}", x), width) for part in "qkv")
        if config.qk_norm:
            q = [_norm(weights, config, f"{name}.q_norm", head) for head in q]
            k = [_norm(weights, config, f"{name}.k_norm", head) for head in k]
        if config.positions == "rotary":
            q = [_turn(config, head, place) for head in q]
            k = [_turn(config, head, place) for head in k]
        # Every second layer, counted from the last one backwards.
        if config.value_embeds and (config.layers - 1 - layer) % 2 == 0:
            extra = _heads(weights[f"value_embeds.{layer}.weight"][token], width)
            gates = 2 / (1 + torch.exp(-(weights[f"{name}.value_gate.weight"] @ x[:12])))
            v = [head + gate * more for head, gate, more in zip(v, gates, extra, strict=True)]
        queries.append(q)
        keys.append(k)
        values.append(v)
    group = config.heads // config.num_kv_heads
    windows = config.windows or (0,)
    window = windows[layer % len(windows)] or len(tokens)
    out = []
    for t in range(len(tokens)):
        heads = []
        for h in range(config.heads):
            seen = range(max(0, t - window + 1), t + 1)
            scores = [queries[t][h] @ keys[s][h // group] / math.sqrt(width) for s in seen]
            shares = torch.softmax(torch.stack(scores), 0)
            heads.append(sum(p * values[s][h // group] for p, s in zip(shares, seen, strict=True)))
        out.append(_linear(weights, f"{name}.o", torch.cat(heads)))
    return out


def _heads(x: Tensor, width: int) -> list[Tensor]:
    return [x[first : first + width] for first in range(0, len(x), width)]


def _feed_forward(weights: Weights, config: ModelConfig, name: str, x: Tensor) -> Tensor:
    x = _norm(weights, config, name + "ffn_norm", x)
    up = _linear(weights, name + "ffn.up", x)
    if config.activation == "swiglu":
        gate = _linear(weights, name + "ffn.gate", x)
        inner = gate / (1 + torch.exp(-gate)) * up
    elif config.activation == "gelu":
        bend = math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)
        inner = up * (1 - 1 / (torch.exp(2 * bend) + 1))
    else:
        inner = torch.where(up > 0, up, 0.0) ** (2 if config.activation == "relu2" else 1)
    return _linear(weights, name + "ffn.down", inner)


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    out = weights[name + ".weight"] @ x
    return out + weights[name + ".bias"] if name + ".bias" in weights else out


def _norm(weights: Weights, config: ModelConfig, name: str, x: Tensor) -> Tensor:
    if config.norm.startswith("layer"):
        x = x - x.sum() / len(x)
    out = x / math.sqrt(float((x * x).sum()) / len(x) + config.norm_eps)
    if name + ".weight" in weights:
        out = out * weights[name + ".weight"]
    return out + weights[name + ".bias"] if name + ".bias" in weights else out


def _turn(config: ModelConfig, x: Tensor, place: int) -> Tensor:
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        speed = config.rope_theta ** (-2 * i / len(x))
        wavelength = 2 * math.pi / speed
        # Llama 3.1, as its release describes it: by wavelength against the original context.
        rope = config.rope_scaling
        if rope.factor != 1:
            if wavelength > rope.original / rope.low:
                speed /= rope.factor
            elif wavelength > rope.original / rope.high:
                smooth = (rope.original / wavelength - rope.low) / (rope.high - rope.low)
                speed = (1 - smooth) * speed / rope.factor + smooth * speed
        a, b = float(x[i]), float(x[i + half])
        cos, sin = math.cos(place * speed), math.sin(place * speed)
        out[i], out[i + half] = a * cos - b * sin, a * sin + b * cos
    return out
