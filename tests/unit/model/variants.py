"""One small model for each field of `ModelConfig`, and one for each family."""

from typing import Any

import torch

from foundling.config.model import ModelConfig
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer

BASE: dict[str, Any] = {
    "vocab_size": 37,
    "dim": 24,
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "ffn_dim": 20,
}
LEARNED = {"positions": 24}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama 3.1": {
        "rope_scaling": {"factor": 8.0, "original": 40},
        "rope_theta": 100.0,
        "head_dim": 8,
    },
    "qwen 2": {"bias": "qkv", "tie_embeddings": True, "rope_theta": 1e6},
    "qwen 3": {"qk_norm": True, "head_dim": 8},
    "layer norm": {"norm": "layer"},
    "layer norm, bare": {"norm": "layer-unscaled", "qk_norm": True},
    "biases": {"bias": "all"},
    "learned positions": LEARNED,
    "gpt": {**LEARNED, "norm": "layer", "bias": "all", "activation": "relu", "kv_heads": 4},
    "gpt 2": {**LEARNED, "norm": "layer", "bias": "all", "activation": "gelu", "kv_heads": 4},
    "squared relu": {"activation": "relu2"},
    "bare norms": {"norm": "rms-unscaled", "embed_norm": True},
    "values": {"value_embeds": True},
    "values, even depth": {"value_embeds": True, "layers": 2},
    "scales": {"residual_scales": True},
    "softcap": {"logit_softcap": 0.5},
    "softcap, tied": {"logit_softcap": 0.5, "tie_embeddings": True},
    "windows": {"windows": (3, 0)},
    "one window": {"windows": (2,)},
    "depth": {
        "activation": "relu2",
        "norm": "rms-unscaled",
        "qk_norm": True,
        "embed_norm": True,
        "rope_theta": 100_000.0,
        "value_embeds": True,
        "residual_scales": True,
        "logit_softcap": 15.0,
        "windows": (4, 4, 4, 0),
    },
    "everything learned": {
        **LEARNED,
        "bias": "all",
        "norm": "layer",
        "value_embeds": True,
        "residual_scales": True,
        "qk_norm": True,
        "embed_norm": True,
        "logit_softcap": 2.0,
        "windows": (4, 4, 4, 0),
        "tie_embeddings": True,
    },
}


def build(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Transformer:
    """The variant with every parameter random: ones and zeros would hide what is left out."""
    model = Transformer(ModelConfig(**{**BASE, **VARIANTS[name], **changes}))
    init_weights(model, 5)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.3 if parameter.dim() == 1 else 0.15)
    return model.to(dtype)
