"""Names, shapes, counts and FLOPs: published figures, and the model that is built."""

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundling.config.errors import ConfigError
from foundling.config.load import load_config
from foundling.config.model import ModelConfig, Norm
from foundling.config.presets import PRESETS
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer
from foundling.optim.rules import assign
from foundling.plan.horizon import plan_horizon
from foundling.plan.params import count_params, flops_per_token, head_std, parameter_shapes

# FACTS.md, section 1: preset and settings, all parameters.
TOTALS = {
    "clm-debug": 13_075_072,
    "clm-60m": 82_101_120,
    "clm-200m": 261_919_488,
    "clm-400m": 455_697_600,
    "clm-600m": 679_552_128,
    "clm-1.1b": 1_145_144_832,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama-1.24b": 1_241_581_568,
    "qwen2-0.5b": 494_032_768,
    "qwen2-0.5b-gpt2": 402_929_280,
    "qwen2-0.5b-gpt2 50304": 402_970_496,
    "tinygpt-524m": 524_830_720,
    "tinygpt-524m 50262": 524_843_520,
}
# Depth: all, matrices and head, flop/token at 2048; nanochat's own counts.
DEPTH = {
    "depth-12": (286_261_730, 110_100_912, 887_098_032),
    "depth-20": (896_533_746, 435_160_240, 3_240_107_184),
}


def meta_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Transformer(config).named_parameters()}


@pytest.mark.parametrize("name", TOTALS)
def test_published_totals(name: str) -> None:
    preset, _, vocab = name.partition(" ")
    model = load_config(preset, {"model.vocab-size": vocab} if vocab else {}).model
    assert count_params(model).all == TOTALS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_names_and_shapes_are_the_built_models_and_each_has_a_rule(name: str) -> None:
    model = load_config(name).model
    model = model.replace(vocab_size=model.vocab_size or 1000)
    built = meta_shapes(model)
    assert list(built.items()) == list(parameter_shapes(model).items())
    assert sum(map(math.prod, built.values())) == count_params(model).all
    covered = assign(built)
    assert sorted(n for members in covered.values() for n in members) == sorted(built)


def test_one_account_called_this_model_524m_461m_500m_and_400m() -> None:
    counts = count_params(load_config("tinygpt-524m").model)
    assert (counts.all, counts.no_input_embedding) == (524_830_720, 460_501_760)
    assert counts.no_positions == 457_880_320
    assert counts.of("no-positions") == counts.no_positions


@pytest.mark.parametrize(
    ("horizon", "steps"), [("4e19 flops", 27_613), ("20 tokens/param", 17_567)]
)
def test_three_ways_to_set_its_horizon(horizon: str, steps: int) -> None:
    found = plan_horizon(load_config("tinygpt-524m", {"train.horizon": horizon}), 8)
    assert found.positions_per_step == 524_288
    assert found.steps == steps
    assert load_config("tinygpt-524m").train.horizon == "20 tokens/param"


@pytest.mark.parametrize("name", DEPTH)
def test_the_depth_dial(name: str) -> None:
    config = load_config(name)
    counts = count_params(config.model)
    total, matrices, flops = DEPTH[name]
    # Without the recipe's smear gate (24), its scale and the mid-layer subtraction's: 26 fewer.
    assert counts.all == total - 26
    assert counts.matrices_and_head == matrices
    assert flops_per_token(config.model, 2048) == pytest.approx(flops, rel=1e-6)
    assert config.model.dim == 64 * config.model.layers == 128 * config.model.heads


def test_any_depth_is_a_preset_and_none_else() -> None:
    assert load_config("depth-7").model.dim == 512
    assert load_config("depth-24").model == load_config("depth-12").model.replace(
        layers=24, dim=1536, heads=12, ffn_dim=6144
    )
    for name in ("depth-0", "depth-", "depth-1x", "depth-100"):
        with pytest.raises(ConfigError, match="no preset"):
            load_config(name)


def shape_strategy() -> st.SearchStrategy[ModelConfig]:
    def make(layers: int, fields: dict[str, Any]) -> ModelConfig:
        return ModelConfig(
            vocab_size=40, dim=24, heads=4, kv_heads=2, ffn_dim=20, layers=layers, **fields,
        )  # fmt: skip

    booleans = ("qk_norm", "embed_norm", "value_embeds", "residual_scales")
    return st.builds(
        make,
        st.integers(1, 4),
        st.fixed_dictionaries(
            {
                "norm": st.sampled_from(get_args(Norm)),
                "bias": st.sampled_from(["none", "qkv", "all"]),
                "positions": st.sampled_from(["rotary", 9]),
                "activation": st.sampled_from(["swiglu", "relu", "relu2", "gelu"]),
                "tie_embeddings": st.booleans(),
                **{name: st.booleans() for name in booleans},
            }
        ),
    )


@settings(max_examples=60, deadline=None)
@given(model=shape_strategy())
def test_every_combination_of_fields_has_its_names_rules_and_counts(model: ModelConfig) -> None:
    built = meta_shapes(model)
    assert list(built.items()) == list(parameter_shapes(model).items())
    assign(built)
    counts = count_params(model)
    embedding = 0 if model.tie_embeddings else 40 * 24
    assert counts.no_input_embedding == counts.all - embedding
    tables = [n for n in built if n.startswith(("embed.", "positions.", "value_embeds."))]
    if model.tie_embeddings:
        tables.remove("embed.weight")
    looked_up = sum(math.prod(built[name]) for name in tables)
    assert counts.no_positions == counts.all - looked_up
    matrices = sum(math.prod(shape) for shape in built.values() if len(shape) == 2)
    assert counts.matrices_and_head == matrices - looked_up


def test_flops_by_definition() -> None:
    model = ModelConfig(vocab_size=50, dim=32, layers=4, heads=2, ffn_dim=64, windows=(3, 0))
    counts = count_params(model)
    seq_len = 10
    seen = {  # keys per query over a row of ten, counted one by one
        "S": sum(min(t + 1, 3) for t in range(seq_len)) / seq_len,
        "L": sum(t + 1 for t in range(seq_len)) / seq_len,
    }
    matrices = 6 * counts.no_positions
    assert flops_per_token(model, seq_len) == matrices + 12 * 32 * 2 * (3 + 10)
    wide = model.replace(windows=())
    assert flops_per_token(wide, seq_len) == matrices + 12 * 32 * 4 * 10
    assert flops_per_token(model, seq_len, causal=True) == pytest.approx(
        matrices + 12 * 32 * 2 * (seen["S"] + seen["L"]), abs=1
    )
    assert flops_per_token(wide, seq_len, causal=True) == pytest.approx(
        matrices + 12 * 32 * 4 * seen["L"], abs=1
    )
    whole = flops_per_token(model, seq_len, embeddings=True)
    assert whole - flops_per_token(model, seq_len) == 6 * 50 * 32


@pytest.mark.parametrize(
    "fields",
    [
        {"norm": "layer", "bias": "all", "positions": 64},
        {"init": {"head_std": 0.12}},
        {"init": {"std": 0.8, "head_std": 0.001}, "logit_softcap": 15.0, "norm": "rms-unscaled"},
        {"tie_embeddings": True, "init": {"std": 0.06}},
    ],
)
def test_the_first_loss_follows_from_the_heads_spread(fields: dict[str, Any]) -> None:
    config = ModelConfig(vocab_size=512, dim=128, layers=2, heads=4, **fields)
    model = Transformer(config)
    init_weights(model, 3)
    tokens = torch.randint(0, 512, (16, 65), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        loss, count = model.loss(tokens[:, :-1], tokens[:, 1:])
    expected = math.log(512) + 128 * head_std(config) ** 2 / 2
    assert float(loss) / int(count) == pytest.approx(expected, rel=0.02)
