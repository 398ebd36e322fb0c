"""Counts and step counts against published figures, and against the model that is built."""

import json
import subprocess
import sys

import pytest

from foundling.config.errors import ConfigError
from foundling.config.load import load_config
from foundling.config.presets import PRESETS
from foundling.plan.forecast import compare, first_loss, forecast
from foundling.plan.horizon import SourceSize, plan_horizon
from foundling.plan.params import count_params, flops_per_token
from foundling.plan.summary import describe
from foundling.plan.supply import allowed_repeats, check_enough_data, epochs_needed

# preset: all parameters, without the input embedding, flop/token at 2048
PUBLISHED = {
    "clm-60m": (82_101_120, 63_226_752, 586_978_560),
    "clm-200m": (261_919_488, 224_170_752, 1_798_009_344),
    "clm-400m": (455_697_600, 408_511_680, 3_158_858_880),
    "clm-600m": (679_552_128, 622_929_024, 4_643_543_808),
    "clm-1.1b": (1_145_144_832, 1_069_647_360, 7_625_843_712),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name: str) -> None:
    model = load_config(name).model
    counts = count_params(model)
    assert (counts.all, counts.no_input_embedding, flops_per_token(model, 2048)) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("clm-debug", 13_075_072),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama-1.24b", 1_241_581_568),
    ],
)
def test_published_totals(name: str, count: int) -> None:
    assert count_params(load_config(name).model).all == count


@pytest.mark.parametrize(
    ("name", "batch", "ranks", "steps"),
    [("clm-60m", 48, 2, 7075), ("clm-400m", 12, 8, 45712), ("clm-1.1b", 24, 8, 59846)],
)
def test_published_step_counts(name: str, batch: int, ranks: int, steps: int) -> None:
    config = load_config(name, {"train.batch-size": str(batch)})
    horizon = plan_horizon(config, ranks)
    assert horizon.steps == steps
    assert horizon.warmup_steps == round(steps / 5)


def test_the_19074_steps_of_the_1b24_run() -> None:
    horizon = plan_horizon(load_config("llama-1.24b"), 8)
    assert (horizon.steps, horizon.positions_per_step, horizon.accumulation) == (19_074, 2**20, 4)


def test_accumulation_rounds_up_and_counts_once() -> None:
    config = load_config("hamlet", {"train.global-batch-tokens": "2560", "train.batch-size": "2"})
    horizon = plan_horizon(config, 3)
    assert (horizon.rows_per_step, horizon.accumulation) == (10, 2)
    assert horizon.positions_per_step == 2560


def test_padding_lengthens_a_horizon_in_tokens() -> None:
    flags = {"train.horizon": "100000 tokens", "data.sources": '{"a": 1}'}
    config = load_config("hamlet", flags)
    full = plan_horizon(config, 1)
    padded = plan_horizon(config, 1, [{"a": SourceSize(units=1000, tokens=1000 * 128)}])
    assert full.tokens_per_step == 2 * padded.tokens_per_step
    assert padded.steps in (2 * full.steps, 2 * full.steps - 1)


def test_flops_and_tokens_per_parameter() -> None:
    for horizon in ("1e16 flops", "20 tokens/param"):
        config = load_config("clm-60m", {"train.horizon": horizon})
        n = count_params(config.model).no_input_embedding
        tokens = 1e16 / (6 * n) if "flops" in horizon else 20 * n
        per_step = config.train.batch_size * config.train.seq_len
        assert plan_horizon(config, 1).steps == -(-tokens // per_step)


def test_epochs_need_data_and_are_exact() -> None:
    config = load_config(
        "hamlet",
        {"train.horizon": "2 epochs", "train.batch-size": "16", "data.sources": '{"a": 1}'},
    )
    with pytest.raises(ConfigError, match=r"data\.sources"):
        plan_horizon(config, 1)
    sizes = [{"a": SourceSize(units=160, tokens=160 * 256)}]
    horizon = plan_horizon(config, 1, sizes)
    assert horizon.steps == 20
    assert epochs_needed(horizon, sizes) == {"a": 2.0}


def test_too_little_data_is_refused_by_name() -> None:
    def allowed(**settings: str) -> float:
        named = {name.replace("__", "."): value for name, value in settings.items()}
        config = load_config("hamlet", named)
        return allowed_repeats(config.data, config.train)

    once = allowed()
    check_enough_data({"books": 1.0}, once)
    with pytest.raises(ConfigError, match=r"books would be read 2\.50 times"):
        check_enough_data({"books": 2.5}, once)
    check_enough_data({"books": 2.5}, allowed(data__allow_repeat="3"))
    check_enough_data({"books": 2.5}, allowed(train__horizon="2.5 epochs"))


def test_a_warm_up_longer_than_the_run_is_refused() -> None:
    config = load_config("hamlet", {"optim.warmup": "9", "train.horizon": "5"})
    with pytest.raises(ConfigError, match=r"optim\.warmup is 9"):
        plan_horizon(config, 1)


def test_errors_are_told_beside_the_plan() -> None:
    plan = {
        "predicted": {
            "tokens": 200,
            "compile_s": 0,
            "first_loss": None,
            "start_s": 5.0,
            "save_s": 0,
        },
        "measured": {
            **{"memory_peak": 428_462_000, "tokens": 210, "compile_s": 3, "first_loss": 2.5},
            **{"start_s": 8.3, "train_s": 600.0, "save_s": 0.0},
        },
    }
    assert compare(plan) == [
        "tokens                  210 (planned 200, +5.0%)",
        "loss of the first step  2.500",
        "start                   8.3 s (planned 5 s, +66.0%)",
        "compilation             3 s (planned 0 s)",
        "training                10.0 minutes",
        "memory at its peak      428.5 MB",
    ]


@pytest.mark.parametrize("tied", [True, False])
def test_the_first_loss_is_the_built_models(tied: bool) -> None:
    import torch

    from foundling.config.model import ModelConfig
    from foundling.model.initialization import init_weights
    from foundling.model.transformer import Transformer

    shape = {"vocab_size": 512, "dim": 128, "layers": 2, "heads": 4}
    config = ModelConfig(**shape, tie_embeddings=tied, init={"std": 0.06})  # type: ignore[arg-type]
    model = Transformer(config)
    init_weights(model, 3)
    tokens = torch.randint(0, 512, (16, 65), generator=torch.Generator().manual_seed(1))
    loss, count = model.loss(tokens[:, :-1], tokens[:, 1:])
    assert loss.item() / count.item() == pytest.approx(first_loss(config), rel=0.01)


def test_no_horizon_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="no horizon"):
        plan_horizon(load_config("llama3-8b"), 1)
    assert forecast(load_config("llama3-8b"), 1).horizon is None


def test_plan_as_json() -> None:
    command = [sys.executable, "-m", "foundling", "plan", "clm-60m", "--json"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(out)["params"]["all"] == 82_101_120


@pytest.mark.parametrize(
    ("target", "settings", "is_told"),
    [
        ("llama3.1-8b", {}, True),
        ("llama3.1-8b-n64", {"train.start": "models/Llama-3.1-8B"}, False),
        (
            "llama3.1-8b-n8-bench",
            {"train.start": "runs/a@5", "train.start_with": "everything"},
            False,
        ),
        ("hamlet", {"optim.lr": "1e-5"}, True),
        ("clm-1.1b", {}, False),
    ],
)
def test_a_fine_tuning_rate_on_fresh_weights_is_warned_of(
    target: str, settings: dict[str, str], is_told: bool
) -> None:
    config = load_config(target, settings)
    plan = forecast(config, 1)
    told = [text for label, text in describe(config, plan) if label == "warning"]
    assert told == list(plan.warnings)
    assert bool(told) == is_told
    assert all("fine-tuning rate" in text and "--start" in text for text in told)


def test_every_preset_begins_at_a_rate_for_its_weights() -> None:
    """But for account 001's, which continue from Meta's; their rate falls linearly."""
    cluster = {name for name in PRESETS if name == "llama3.1-8b" or "llama3.1-8b-n" in name}
    warned = {name for name in PRESETS if forecast(PRESETS[name](), 1).warnings}
    assert warned == cluster
    for name in cluster:
        optim = PRESETS[name]().optim
        assert (optim.schedule, optim.final_lr_share, optim.lr) == ("linear", 0.0, 3e-5)
