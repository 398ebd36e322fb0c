"""Models that transformers made, with random weights: imported, they agree; exported again, they
are bit for bit what they were, and transformers loads them by its own door."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foundling.checkpoint.convert.compare_models import hf_logits, our_logits
from foundling.checkpoint.convert.convert import convert
from foundling.checkpoint.convert.detect import open_source
from foundling.checkpoint.convert.hf_config import read_json, unknown_key

transformers: Any = pytest.importorskip("transformers")

BASE = {
    "vocab_size": 211,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 112,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }


def llama(**more: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**BASE, **more}))


def gpt2(**more: Any) -> Any:
    config = {"vocab_size": 211, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 300}
    ends = {"bos_token_id": 1, "eos_token_id": 1}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config, **ends, **more))


def opt() -> Any:
    config = transformers.OPTConfig(
        vocab_size=211,
        hidden_size=48,
        word_embed_proj_dim=48,
        num_hidden_layers=2,
        ffn_dim=100,
        num_attention_heads=6,
        max_position_embeddings=300,
    )
    return transformers.OPTForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {
    "llama 2": lambda: llama(num_key_value_heads=6),
    "llama 3": lambda: llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    "llama 3.1": lambda: llama(rope_parameters=llama3(8.0)),
    "llama 3.2": lambda: llama(rope_parameters=llama3(32.0), tie_word_embeddings=True, head_dim=16),
    "llama with biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "smollm": lambda: llama(
        num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True, rms_norm_eps=1e-5
    ),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**BASE, sliding_window=40)
    ),
    "qwen 2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**BASE, tie_word_embeddings=True)
    ),
    "qwen 3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**BASE, head_dim=12)),
    "gpt 2": gpt2,
    "gpt 2, untied": lambda: gpt2(tie_word_embeddings=False, activation_function="relu"),
    "opt": opt,
}


def made(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Their model with every parameter random, in a folder that their own code wrote."""
    torch.manual_seed(5)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2 if parameter.dim() == 1 else 0.1)
    model = model.to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_theirs_comes_in_and_goes_out_unchanged(name: str, tmp_path: Path) -> None:
    theirs = made(name, tmp_path / "theirs")
    _, found = convert(tmp_path / "theirs", tmp_path / "run", "native")
    assert found.source_through.startswith("transformers")
    assert found.largest < 1e-4
    tokens = torch.randint(211, (1, 190), generator=torch.Generator().manual_seed(1))
    native = open_source(tmp_path / "run")
    with torch.no_grad():
        expected = theirs(tokens).logits[0]
    ours = our_logits(native.model, native.read, tokens)
    assert (ours - expected).abs().max() < 1e-4
    assert expected.std() > 0.1
    if name == "opt":  # goes out as a GPT-2, which is the same function
        return
    _, found = convert(tmp_path / "run", tmp_path / "again", "hf")
    assert found.result_through.startswith("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    one, other = theirs.state_dict(), loaded.state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    with torch.no_grad():
        assert (loaded(tokens).logits[0] - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", [name for name in MODELS if name != "opt"])
def test_in_bf16_the_streamed_layers_are_the_whole_model(name: str, tmp_path: Path) -> None:
    """A conversion runs transformers' class one weight at a time, in fp32."""
    made(name, tmp_path, torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        auto = transformers.AutoModelForCausalLM
        theirs = auto.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.randint(211, (1, 190), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits[0]
    source = open_source(tmp_path)
    for found in (
        hf_logits(tmp_path, source.stored, tokens)[0],
        our_logits(source.model, source.read, tokens),
    ):
        assert (found - expected).abs().max() < 1e-4


def test_configs_that_transformers_writes_have_no_unknown_key(tmp_path: Path) -> None:
    """Without transformers such a folder would be refused."""
    for name, model in MODELS.items():
        model().config.save_pretrained(tmp_path)
        assert unknown_key(read_json(tmp_path / "config.json")) == "", name


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_that_no_class_expresses_brings_its_own_code(tied: bool, tmp_path: Path) -> None:
    from foundling.checkpoint.convert.model_source import SidecarShape, sidecar_json
    from foundling.config.model import ModelConfig
    from foundling.model.initialization import init_weights
    from foundling.model.transformer import Transformer
    from foundling.tokenizer.bpe_trainer import train_tokenizer

    tokenizer = train_tokenizer(["The miller went to the market. "] * 20, 270)
    tokenizer.save(tmp_path / "tokenizer")
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        dim=48,
        layers=4,
        heads=6,
        kv_heads=2,
        ffn_dim=100,
        activation="relu2",
        norm="rms-unscaled",
        qk_norm=True,
        embed_norm=True,
        value_embeds=True,
        residual_scales=True,
        logit_softcap=15.0,
        windows=(9, 9, 9, 0),
        tie_embeddings=tied,
        init={"std": 0.8},
        rope_scaling={"factor": 4.0 if tied else 1.0, "original": 16 if tied else 8192},
    )
    ours = Transformer(config).eval()
    init_weights(ours, 3)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    torch.save(
        {"model": ours.state_dict(), "foundling": sidecar_json(SidecarShape(config))},
        tmp_path / "a",
    )
    convert(tmp_path / "a", tmp_path / "hf", "hf")
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")  # without our code
    assert read("The miller", add_special_tokens=False)["input_ids"] == tokenizer.encode(
        "The miller"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        auto = transformers.AutoModelForCausalLM
        theirs = auto.from_pretrained(tmp_path / "hf", trust_remote_code=True).eval()
        tokens = torch.randint(211, (2, 30), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            assert (theirs(tokens).logits - ours(tokens)).abs().max() < 1e-4
            expected = tokens
            for _ in range(12):  # beyond the window, one by one and without a cache
                following = ours(expected)[:, -1:].argmax(-1)
                expected = torch.cat((expected, following), 1)
            settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
            cached = theirs.generate(tokens, **settings)
            padded = torch.cat((torch.zeros(2, 5, dtype=torch.long), tokens), 1)
            mask = torch.ones_like(padded)
            mask[:, :5] = 0
            left = theirs.generate(padded, attention_mask=mask, **settings)
        theirs.save_pretrained(tmp_path / "saved")
    assert torch.equal(cached, expected)
    assert torch.equal(left[:, 5:], expected)
    assert open_source(tmp_path / "hf").model == config
    assert open_source(tmp_path / "saved").model == config
