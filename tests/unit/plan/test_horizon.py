"""Phases in the plan: tokens and epochs add up over them, memory is that of the heaviest."""

from pathlib import Path

import pytest

from foundling.config.data import PhaseConfig
from foundling.config.errors import ConfigError
from foundling.config.load import load_config
from foundling.config.run import RunConfig
from foundling.plan.forecast import PlanOptions, study
from foundling.plan.horizon import SourceSize, batch_tokens, micro_rows, plan_horizon
from foundling.plan.supply import epochs_needed, known_sizes, plan_supply

LONG = PhaseConfig(at=0.9, seq_len=4096)


def phased(target: str, *phases: PhaseConfig, **settings: str) -> RunConfig:
    config = load_config(target, {name.replace("__", "."): text for name, text in settings.items()})
    return config.replace(data={"phases": phases})


def test_the_last_tenth_at_4096() -> None:
    """Account 004: 19,074 steps of 2^20 tokens, 90% of them at 2048 and the rest at 4096."""
    horizon = plan_horizon(phased("llama-1.24b", LONG), 8)
    assert horizon.steps == 19_074
    first, last = horizon.phases
    assert (first.first_step, first.steps, first.rows_per_step) == (0, 17_167, 512)
    assert (last.first_step, last.steps, last.rows_per_step) == (17_167, 1_907, 256)
    assert first.positions_per_step == last.positions_per_step == 2**20
    assert first.accumulation == last.accumulation == 4
    assert horizon.tokens == 19_074 * 2**20


def sizes(padding: float) -> list[dict[str, SourceSize]]:
    """Two sources, the second phase's rows padded."""
    full = {"a": SourceSize(units=4000, tokens=4000 * 64, documents=400)}
    long = SourceSize(units=2000, tokens=round(2000 * 128 * (1 - padding)), documents=200)
    other = SourceSize(units=500, tokens=500 * 128, documents=100)
    return [full, {"a": long, "b": other}]


MIXED = PhaseConfig(at=0.5, seq_len=128, sources={"a": 1.0, "b": 1.0})
SMALL = {"train__seq_len": "64", "train__batch_size": "8", "data__sources": '{"a": 1}'}


@pytest.mark.parametrize("tokens", [99_999, 100_000, 100_001, 102_400])
def test_a_horizon_in_tokens_is_the_fewest_steps_over_all_phases(tokens: int) -> None:
    config = phased("hamlet", MIXED, train__horizon=f"{tokens} tokens", **SMALL)
    known = sizes(padding=0.5)
    found = plan_horizon(config, 1, known)
    rates = [phase.tokens_per_step for phase in found.phases]
    assert rates == [512, 4 * 128 * 0.75]  # half of the second mixture is half empty
    assert found.tokens >= tokens
    fewer = plan_horizon(config.replace(train={"horizon": found.steps - 1}), 1, known)
    assert fewer.tokens < tokens


def test_epochs_of_a_source_add_up_over_phases() -> None:
    config = phased("hamlet", MIXED, train__horizon="200", **SMALL)
    horizon = plan_horizon(config, 1, sizes(padding=0.0))
    epochs = epochs_needed(horizon, sizes(padding=0.0))
    assert epochs == {"a": 100 * 8 / 4000 + 100 * 2 / 2000, "b": 100 * 2 / 500}


def test_weights_by_tokens_become_shares_of_rows() -> None:
    config = phased("hamlet", MIXED, train__horizon="200", **SMALL)
    config = config.replace(data={"weights_by": "tokens"})
    shares = plan_horizon(config, 1, sizes(padding=0.5)).phases[1].weights
    assert shares == {"a": pytest.approx(2 / 3), "b": pytest.approx(1 / 3)}


def test_rows_of_another_length_fill_a_micro_step_alike() -> None:
    config = phased("llama-1.24b", LONG, train__batch_size="3", train__global_batch_tokens="0")
    cuts = [phase.seq_len for phase in plan_horizon(load_config("llama-1.24b"), 8).phases]
    assert cuts == [2048]
    from foundling.config.data import phase_mixtures

    short, long = (spec for _, spec in phase_mixtures(config.data, 2048))
    assert (micro_rows(config.train, short), micro_rows(config.train, long)) == (3, 1)
    assert batch_tokens(config, 8) == 3 * 8 * 2048


def test_the_memory_is_that_of_the_phase_that_needs_most() -> None:
    plain = study(load_config("llama-1.24b"), "b200", PlanOptions())
    # One row of 64k is far more positions than a micro-step of rows of 2048.
    longer = phased("llama-1.24b", PhaseConfig(at=0.9, seq_len=65_536))
    long = study(longer, "b200", PlanOptions())
    assert long.choice.memory.needed > 1.2 * plain.choice.memory.needed
    assert long.choice.speed.step_s == plain.choice.speed.step_s
    assert plain.hours is not None
    assert long.hours is not None
    assert long.hours > 1.05 * plain.hours
    [first, second] = long.choice.speeds
    assert long.horizon is not None
    by_hand = sum(
        p.steps * s.step_s for p, s in zip(long.horizon.phases, (first, second), strict=True)
    )
    assert long.hours == pytest.approx(by_hand / 3600)


def test_hours_pay_for_the_steps_of_all_phases() -> None:
    config = phased("llama-1.24b", LONG, train__horizon="10 hours")
    found = study(config, "h200", PlanOptions())
    assert found.hours == pytest.approx(10, rel=0.001)


def test_a_batch_that_a_phase_cannot_be_cut_into_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.global_batch_tokens \d+ is not a multiple"):
        plan_horizon(phased("llama-1.24b", PhaseConfig(at=0.5, seq_len=3000)), 8)


def test_manifests_of_every_phase_are_read(tiny: RunConfig, tmp_path: Path) -> None:
    import shutil

    [text] = tiny.data.sources
    copy = tmp_path / "late"
    shutil.copytree(text, copy)
    phase = PhaseConfig(at=0.5, seq_len=128, sources={str(copy): 1.0}, packing="concat")
    config = tiny.replace(data={"phases": (phase,)})
    config, known = known_sizes(config)
    assert known is not None
    assert [list(one) for one in known] == [[text], [str(copy)]]
    horizon = plan_horizon(config, 1, known)
    supply = plan_supply(config, horizon)
    assert list(supply.sources) == [text, str(copy)]
    assert supply.sources[str(copy)]["needed"] == pytest.approx(4 * 256, rel=0.01)
