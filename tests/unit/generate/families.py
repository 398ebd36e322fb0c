"""Small models of every family that the engine has to serve, and the plain decoder beside it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foundling.config.model import ModelConfig
from foundling.generate.engine import Engine
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer
from foundling.plan.serving import BLOCK

VOCABULARY = 211
CONFIG = ModelConfig(
    vocab_size=VOCABULARY, dim=48, layers=3, heads=6, kv_heads=2, ffn_dim=96, init={"std": 0.5}
)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_embeddings": True, "bias": "qkv", "kv_heads": 1},
    "gpt": {
        "positions": 128, "norm": "layer", "bias": "all",
        "activation": "gelu", "kv_heads": 0,
    },
    "depth": {
        "qk_norm": True, "norm": "rms-unscaled", "activation": "relu2", "value_embeds": True,
        "residual_scales": True, "logit_softcap": 15.0, "embed_norm": True, "kv_heads": 0,
    },
    "windows": {"windows": (20, 20, 0), "qk_norm": True},
    "all windowed": {"windows": (9,)},
}  # fmt: skip


def build(family: str = "llama", seed: int = 5, **changes: Any) -> Transformer:
    """A model whose next tokens vary, ready to evaluate."""
    model = Transformer(CONFIG.replace(**{**FAMILIES[family], **changes}))
    init_weights(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("value_gate.weight") or parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.requires_grad_(False).eval()


def small_engine(model: Transformer, blocks: int = 12, **limits: Any) -> Engine:
    """An engine with so few blocks that requests have to wait and are preempted."""
    config = model.config
    token = 2 * 4 * config.layers * config.num_kv_heads * config.head_width
    limits = {"max_running": 6, "step_tokens": 24, "max_length": 128, **limits}
    return Engine(model, "cpu", cache_bytes=token * BLOCK * blocks, **limits)


def plain_logits(model: Transformer, text: Sequence[int]) -> Tensor:
    """What the model says after each token of a text, without any cache, [T, V]."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([list(text)]))[0]
    return logits


def misses(
    model: Transformer, prompt: Sequence[int], said: Sequence[int], tie: float = 1e-4
) -> tuple[int, int]:
    """(tokens that greedy decoding would not say, tokens where the best two are nearly equal): the
    plain decoder reads what the engine said, and goes on from there."""
    logits = plain_logits(model, [*prompt, *said])[len(prompt) - 1 : -1]
    wrong = ties = 0
    for row, token in zip(logits, said, strict=True):
        best = row.topk(2).values
        ties += bool(best[0] - best[1] < tie)
        wrong += bool(row.max() - row[token] >= tie)
    return wrong, ties
