"""Meta's layout, run as Meta's own code runs it: neighbouring rows of q and k turn together.

A conversion runs this layout by our model, which turns the rows back first: a mistake in that would
be made on the way out and on the way in alike, and every bit would be as it was. It is held here.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convert_samples import FAMILIES, META, as_layout, random_model
from torch import Tensor

from foundling.checkpoint import name_map
from foundling.config.model import ModelConfig


def meta_logits(model: ModelConfig, stored: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Logits [T, V] of ids [T] by the formulas of Meta's llama repository."""
    count, width = len(ids), model.head_width
    turns = rotations(model, count)[:, None]
    unseen = torch.ones(count, count, dtype=torch.bool).triu(1)

    def norm(x: Tensor, name: str) -> Tensor:
        root = torch.rsqrt(x.square().mean(-1, keepdim=True) + model.norm_eps)
        return x * root * stored[f"{name}.weight"]

    def turned(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(count, -1, width // 2, 2).contiguous())
        return torch.view_as_real(pairs * turns).flatten(2)

    x = F.embedding(ids, stored["tok_embeddings.weight"])
    for layer in range(model.layers):
        at = f"layers.{layer}"
        part = {p: stored[f"{at}.attention.w{p}.weight"] for p in "qkvo"}
        up, down, gate = (stored[f"{at}.feed_forward.w{n}.weight"] for n in (3, 2, 1))
        y = norm(x, f"{at}.attention_norm")
        q, k, v = ((y @ part[p].T).view(count, -1, width) for p in "qkv")
        shared = model.heads // model.num_kv_heads
        k, v = (one.repeat_interleave(shared, 1) for one in (turned(k), v))
        scores = torch.einsum("qhd,khd->hqk", turned(q), k) / math.sqrt(width)
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, -math.inf).softmax(-1), v)
        x = x + mixed.flatten(1) @ part["o"].T
        y = norm(x, f"{at}.ffn_norm")
        x = x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
    return norm(x, "norm") @ stored["output.weight"].T


def rotations(model: ModelConfig, count: int) -> Tensor:
    """Complex numbers of length 1 [T, D / 2]; slow ones are found by their wavelength."""
    speeds = [model.rope_theta ** (-i / model.head_width) for i in range(0, model.head_width, 2)]
    rope = model.rope_scaling
    for number, speed in enumerate(speeds if rope.factor != 1 else ()):
        turns = rope.original * speed / (2 * math.pi)
        kept = (turns - rope.low) / (rope.high - rope.low)
        kept = min(max(kept, 0.0), 1.0)
        speeds[number] = kept * speed + (1 - kept) * speed / rope.factor
    angles = torch.outer(torch.arange(count).double(), torch.tensor(speeds).double())
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def difference(config: ModelConfig, home: Path) -> float:
    stored = torch.load(as_layout(home, config, "llama") / "consolidated.00.pth")
    ids = torch.randint(211, (90,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = random_model(config)(ids[None])[0]
        return float((meta_logits(config, stored, ids) - expected).abs().max())


@pytest.mark.parametrize("family", META)
def test_a_result_is_the_same_function_by_metas_formulas(family: str, tmp_path: Path) -> None:
    assert difference(FAMILIES[family], tmp_path) < 1e-4


def test_rows_of_q_and_k_left_in_our_order_are_another_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = name_map._place

    def unturned(model: Any, name: str, layout: Any) -> name_map.TensorPlace:
        return replace(honest(model, name, layout), heads=0)

    monkeypatch.setattr(name_map, "_place", unturned)
    assert difference(FAMILIES["llama 3.1"], tmp_path) > 1e-2
