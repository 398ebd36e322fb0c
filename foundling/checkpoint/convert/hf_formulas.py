"""Logits of a Hugging Face folder by the formulas of transformers' classes, from its config.json
and its tensors as they are stored.

Nothing that a conversion uses takes part: not our reader of their config, not our names, not our
model. So a mistake in those shows, as it would in transformers, whose import takes longer than a
conversion of a billion parameters; the parity tests hold these formulas against its classes.
Families that are not here, and configs with a key that hf_unknown.py does not know, are run by
transformers itself: nothing is left out silently.
"""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foundling.checkpoint.convert.forward import Read
from foundling.checkpoint.convert.hf_unknown import unknown_key
from foundling.checkpoint.convert.products import Scratch, by_columns, by_rows
from foundling.checkpoint.convert.source import Source, Stored
from foundling.config import CheckpointError

WRITTEN = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
"""Families whose formulas are here."""
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


def has_formulas(source: Source) -> bool:
    """Whether it is a folder of a family whose formulas are here, and they know all of its keys."""
    return source.kind == "hf" and is_written(source) and not beyond(source)


def is_written(source: Source) -> bool:
    """Whether a Hugging Face folder is of a family whose formulas are here."""
    return _config(source.path).get("model_type") in WRITTEN


def beyond(source: Source) -> str:
    """A key of its config.json that the formulas do not know; "" if they know all."""
    return unknown_key(_config(source.path))


def formula_logits(
    folder: Path, stored: Stored, rounded: Callable[[Tensor], Tensor], tokens: Tensor
) -> tuple[Tensor, set[str]]:
    """Logits [T, V] of tokens [1, T], in fp32 from weights as `rounded` makes them; and the names
    of the tensors that were used."""
    config, used = _config(folder), set[str]()
    is_gpt2 = config["model_type"] == "gpt2"
    base = "transformer." if is_gpt2 else "model."

    def read(name: str) -> Tensor:
        # The base model may have been saved alone, without its own name before its parts'.
        name = name if name in stored.specs else name.removeprefix(base)
        if name not in stored.specs:
            raise CheckpointError(f"{folder} lacks {name}, which its formulas ask for.")
        used.add(name)
        return rounded(stored.read(name))

    with torch.inference_mode():
        run = _gpt2 if is_gpt2 else _llama
        return run(config, read, tokens[0], Scratch()), used


def _config(folder: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return tree


def _get(config: dict[str, Any], name: str, default: Any) -> Any:
    """A key; one that is null is one that is not there."""
    value = config.get(name)
    return default if value is None else value


def _llama(config: dict[str, Any], read: Read, ids: Tensor, scratch: Scratch) -> Tensor:
    """LlamaForCausalLM and what shares its shape: Mistral's window, Qwen's biases and norms."""
    eps = float(_get(config, "rms_norm_eps", 1e-6))
    heads = int(config["num_attention_heads"])
    usual = 128 if config["model_type"] == "qwen3" else config["hidden_size"] // heads
    width = int(_get(config, "head_dim", usual))
    turns = _cos_and_sin(config, width, len(ids))
    hidden = _hidden_keys(config, len(ids))
    act = _ACTIVATIONS[_get(config, "hidden_act", "silu")]
    # Qwen 2 has them for q, k and v whatever it says, and like Mistral nowhere else.
    asks = config["model_type"] in ("llama", "qwen3") and _get(config, "attention_bias", False)
    has_bias = {
        "qkv": bool(asks) or config["model_type"] == "qwen2",
        "o": bool(asks),
        "mlp": config["model_type"] == "llama" and bool(_get(config, "mlp_bias", False)),
    }

    def times(y: Tensor, name: str, bias: bool) -> Tensor:
        product = by_rows(y, read(f"{name}.weight"), scratch)
        return product + read(f"{name}.bias").float() if bias else product

    x = F.embedding(ids, read("model.embed_tokens.weight")).float()
    for layer in range(int(config["num_hidden_layers"])):
        at = f"model.layers.{layer}"
        y = _rms(x, read(f"{at}.input_layernorm.weight"), eps)
        q, k, v = (
            times(y, f"{at}.self_attn.{part}_proj", has_bias["qkv"]).view(len(ids), -1, width)
            for part in "qkv"
        )
        if config["model_type"] == "qwen3":
            q = _rms(q, read(f"{at}.self_attn.q_norm.weight"), eps)
            k = _rms(k, read(f"{at}.self_attn.k_norm.weight"), eps)
        mixed = _attention(_rotated(q, turns), _rotated(k, turns), v, hidden)
        x = x + times(mixed, f"{at}.self_attn.o_proj", has_bias["o"])
        y = _rms(x, read(f"{at}.post_attention_layernorm.weight"), eps)
        gate, up = (times(y, f"{at}.mlp.{part}_proj", has_bias["mlp"]) for part in ("gate", "up"))
        x = x + times(act(gate) * up, f"{at}.mlp.down_proj", has_bias["mlp"])
    x = _rms(x, read("model.norm.weight"), eps)
    is_tied = bool(_get(config, "tie_word_embeddings", False))
    return by_rows(x, read("model.embed_tokens.weight" if is_tied else "lm_head.weight"), scratch)


def _gpt2(config: dict[str, Any], read: Read, ids: Tensor, scratch: Scratch) -> Tensor:
    """GPT2LMHeadModel, whose matrices multiply from the right."""
    eps = float(_get(config, "layer_norm_epsilon", 1e-5))
    heads = int(_get(config, "n_head", 12))
    act = _ACTIVATIONS[_get(config, "activation_function", "gelu_new")]

    def norm(y: Tensor, name: str) -> Tensor:
        weight, bias = read(f"{name}.weight").float(), read(f"{name}.bias").float()
        return F.layer_norm(y, y.shape[-1:], weight, bias, eps)

    def times(y: Tensor, name: str) -> Tensor:
        return by_columns(y, read(f"{name}.weight"), scratch) + read(f"{name}.bias").float()

    table = "transformer.wte.weight"
    x = F.embedding(ids, read(table)).float()
    x = x + read("transformer.wpe.weight")[: len(ids)].float()
    hidden = _hidden_keys({}, len(ids))
    for layer in range(int(_get(config, "n_layer", 12))):
        at = f"transformer.h.{layer}"
        together = times(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn")
        q, k, v = (part.reshape(len(ids), heads, -1) for part in together.chunk(3, 1))
        x = x + times(_attention(q, k, v, hidden), f"{at}.attn.c_proj")
        inner = act(times(norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc"))
        x = x + times(inner, f"{at}.mlp.c_proj")
    is_tied = bool(_get(config, "tie_word_embeddings", True))
    return by_rows(
        norm(x, "transformer.ln_f"), read(table if is_tied else "lm_head.weight"), scratch
    )


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight.float() * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def _attention(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """q [T, heads, D], k and v [T, fewer, D], each of which serves several neighbours."""
    shares = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shares, 1), v.repeat_interleave(shares, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    seen = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", seen, v).flatten(1)


def _hidden_keys(config: dict[str, Any], count: int) -> Tensor:
    """[T, T]: what comes later, and under Mistral's window what lies too far back."""
    back = torch.arange(count)[:, None] - torch.arange(count)
    # null is no window; where the key is missing their class takes 4096.
    window = config.get("sliding_window", 4096) if config.get("model_type") == "mistral" else None
    return (back < 0) | (back >= window) if window else back < 0


def _rotated(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """x [T, heads, D]: number i turns together with number i + D / 2."""
    cos, sin = turns
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def _cos_and_sin(config: dict[str, Any], width: int, count: int) -> tuple[Tensor, Tensor]:
    stated = _get(config, "rope_parameters", None) or _get(config, "rope_scaling", None) or {}
    theta = float(stated.get("rope_theta") or _get(config, "rope_theta", 10000.0))
    speeds = 1 / theta ** (torch.arange(0, width, 2).double() / width)
    if stated.get("rope_type", stated.get("type")) == "llama3":
        speeds = _scaled(speeds, stated)
    angles = torch.outer(torch.arange(count).double(), speeds).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


def _scaled(speeds: Tensor, stated: dict[str, Any]) -> Tensor:
    """Llama 3.1's: slow turns are slowed further, fast ones are not, those between in part."""
    turns = float(stated["original_max_position_embeddings"]) * speeds / (2 * math.pi)
    low, high = float(stated["low_freq_factor"]), float(stated["high_freq_factor"])
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * speeds + (1 - kept) * speeds / float(stated["factor"])
