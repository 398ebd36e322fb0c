"""Logits of each family against transformers' own class, with every parameter random.

Llama 3.1 and 3.2 (scaled rotary positions), Qwen 2 (biases), Qwen 3 (norms of q and k), Mistral
(windows), OPT (learned positions, LayerNorm, biases, ReLU) and NanoChat (the depth recipe as it was
before value embeddings and residual scales).
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from foundling.checkpoint.name_map import translated
from foundling.config.model import ModelConfig
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer

transformers: Any = pytest.importorskip("transformers")

BASE = ModelConfig(vocab_size=211, dim=48, layers=3, heads=6, kv_heads=2, ffn_dim=112)
SCALED = BASE.replace(
    rope_theta=500_000.0, head_dim=16, rope_scaling={"factor": 8.0, "original": 128}
)
SHAPES = {
    "llama 3.1": SCALED,
    "llama 3.2": SCALED.replace(rope_scaling={"factor": 32.0}, tie_embeddings=True),
    "llama, other bounds": SCALED.replace(rope_scaling={"factor": 4.0, "low": 2.0, "high": 8.0}),
    "qwen 2": BASE.replace(bias="qkv", norm_eps=1e-6, rope_theta=1e6, tie_embeddings=True),
    "qwen 3": BASE.replace(qk_norm=True, head_dim=12, norm_eps=1e-6),
    "mistral": BASE.replace(windows=(20,)),
    "opt": BASE.replace(
        kv_heads=0,
        activation="relu",
        norm="layer",
        bias="all",
        positions=200,
    ),
    "nanochat": BASE.replace(
        activation="relu2",
        norm="rms-unscaled",
        qk_norm=True,
        embed_norm=True,
        rope_theta=100_000.0,
        logit_softcap=15.0,
        norm_eps=1e-6,
    ),
}


def random_model(config: ModelConfig) -> Transformer:
    model = Transformer(config)
    init_weights(model, 7)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # ones and zeros would hide one in the wrong place
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model.eval()


def common(config: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if (scaling := config.rope_scaling).factor != 1:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low,
            "high_freq_factor": scaling.high,
            "original_max_position_embeddings": scaling.original,
        }
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.ffn_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": 4096,
        "attn_implementation": "eager",
    }


def theirs_of(family: str, config: ModelConfig) -> tuple[Any, Callable[[str], str]]:
    """Their model, and their name of our parameter."""
    fields = common(config)
    if family.startswith("llama"):
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
    elif family == "qwen 2":
        del fields["head_dim"]
        made = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**fields))
    elif family == "qwen 3":
        made = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**fields))
    elif family == "mistral":
        fields["sliding_window"] = config.windows[0]
        made = transformers.MistralForCausalLM(transformers.MistralConfig(**fields))
    elif family == "nanochat":
        fields["final_logit_softcapping"] = config.logit_softcap
        made = transformers.NanoChatForCausalLM(transformers.NanoChatConfig(**fields))
        return made.eval(), nanochat_name
    else:
        made = transformers.OPTForCausalLM(
            transformers.OPTConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.dim,
                word_embed_proj_dim=config.dim,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                ffn_dim=config.ffn_dim,
                max_position_embeddings=config.max_positions,
                activation_function="relu",
                tie_word_embeddings=False,
            )
        )
        return made.eval(), opt_name
    return made.eval(), lambda name: translated(name, "hf")


def opt_name(name: str) -> str:
    parts = {
        r"^(layers|embed|positions|norm)": r"model.decoder.\1",
        r"\.embed\.": ".embed_tokens.",
        r"\.positions\.": ".embed_positions.",
        r"decoder\.norm": "decoder.final_layer_norm",
        r"attn_norm": "self_attn_layer_norm",
        r"ffn_norm": "final_layer_norm",
        r"\.attn\.([qkv])\.": r".self_attn.\1_proj.",
        r"\.attn\.o\.": ".self_attn.out_proj.",
        r"ffn\.up": "fc1",
        r"ffn\.down": "fc2",
        r"^head": "lm_head",
    }
    for pattern, text in parts.items():
        name = re.sub(pattern, text, name)
    return name


def nanochat_name(name: str) -> str:
    name = name.replace("ffn.up", "mlp.fc1").replace("ffn.down", "mlp.fc2")
    return name.replace("layers", "model.layers") if "mlp" in name else translated(name, "hf")


def as_theirs(family: str, name: str, weight: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    if family == "opt" and name == "positions.weight":
        return torch.cat((torch.zeros(2, config.dim), weight))  # their first position is row 2
    if family == "nanochat" and re.search(r"attn\.[qk]\.", name):
        # It turns the other way round, which is ours with the second half of each head negated.
        half = config.head_width // 2
        sign = torch.cat((torch.ones(half), -torch.ones(half)))
        return weight * sign.repeat(len(weight) // config.head_width)[:, None]
    return weight


@pytest.mark.parametrize("family", SHAPES)
def test_logits_are_those_of_transformers(family: str) -> None:
    config = SHAPES[family]
    ours = random_model(config)
    theirs, name_of = theirs_of(family, config)
    weights = {
        name_of(name): as_theirs(family, name, weight, config)
        for name, weight in ours.state_dict().items()
    }
    result = theirs.load_state_dict(weights, strict=False)
    assert result.unexpected_keys == []
    assert result.missing_keys == (["lm_head.weight"] if config.tie_embeddings else [])
    tokens = torch.randint(211, (2, 190), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = theirs(tokens).logits, ours(tokens)
    assert (found - expected).abs().max() < 1e-4
    assert found.std() > 0.05


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("llama 3.1", "rope_scaling", {"factor": 4.0}),
        ("mistral", "windows", (21,)),
        ("nanochat", "logit_softcap", 9.0),
    ],
)
def test_another_value_is_another_function(family: str, field: str, value: Any) -> None:
    """So the agreement above is not for want of sensitivity."""
    ours = random_model(SHAPES[family])
    other = Transformer(SHAPES[family].replace(**{field: value})).eval()  # type: ignore[arg-type]
    other.load_state_dict(ours.state_dict())
    tokens = torch.randint(211, (2, 190), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (ours(tokens) - other(tokens)).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["qwen 2", "qwen 3"])
def test_names_are_all_of_theirs(family: str) -> None:
    theirs, _ = theirs_of(family, SHAPES[family])
    ours = [name for name, _ in Transformer(SHAPES[family]).named_parameters()]
    assert {translated(name, "hf") for name in ours} == {
        name for name, _ in theirs.named_parameters()
    }
