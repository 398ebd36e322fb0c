"""Logits, loss and names against transformers' own Llama, with random weights."""

from typing import Any

import pytest
import torch

from foundling.checkpoint.name_map import translated
from foundling.config.errors import CheckpointError
from foundling.config.model import ModelConfig
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer

pytest.importorskip("transformers")

BASE = ModelConfig(vocab_size=211, dim=48, layers=3, heads=6, ffn_dim=112, rope_theta=500000.0)
SHAPES = {
    "plain": BASE,
    "grouped": BASE.replace(kv_heads=2),
    "one key head": BASE.replace(kv_heads=1, tie_embeddings=True),
    "tied": BASE.replace(tie_embeddings=True, norm_eps=1e-6),
    "wide heads": BASE.replace(head_dim=20, kv_heads=3),
    "narrow heads": BASE.replace(head_dim=4, tie_embeddings=True),
}


def hf_llama(config: ModelConfig) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    build: Any = LlamaForCausalLM
    return build(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_width,
            intermediate_size=config.ffn_dim,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tie_embeddings,
            max_position_embeddings=1024,
        )
    ).eval()


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_loss_are_those_of_transformers(shape: str) -> None:
    config = SHAPES[shape]
    ours = Transformer(config)
    init_weights(ours, 7)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if "norm" in name:  # ones would hide a norm in the wrong place
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    theirs = hf_llama(config)
    result = theirs.load_state_dict(
        {translated(name, "hf"): parameter for name, parameter in ours.state_dict().items()},
        strict=False,
    )
    assert result.unexpected_keys == []
    assert result.missing_keys == (["lm_head.weight"] if config.tie_embeddings else [])
    tokens = torch.randint(211, (2, 300), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens, labels=tokens)
        logits = ours(tokens)
        total, count = ours.loss(tokens[:, :-1], tokens[:, 1:])
    assert (logits - expected.logits).abs().max() < 1e-4
    assert logits.std() > 0.05
    assert float(total) / int(count) == pytest.approx(float(expected.loss), abs=1e-5)


@pytest.mark.parametrize("shape", ["plain", "tied"])
def test_names_map_onto_all_of_theirs(shape: str) -> None:
    ours = [name for name, _ in Transformer(SHAPES[shape]).named_parameters()]
    theirs = {name for name, _ in hf_llama(SHAPES[shape]).named_parameters()}
    assert {translated(name, "hf") for name in ours} == theirs
    assert len(ours) == len(theirs)


def test_an_unknown_name_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"layers\.0\.moe\.weight"):
        translated("layers.0.moe.weight", "hf")
