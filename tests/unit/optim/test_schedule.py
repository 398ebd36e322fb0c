"""Schedules against points computed by hand."""

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundling.config.optim import OptimConfig, ScheduleName
from foundling.optim.schedule import lr_at
from foundling.plan.horizon import warmup_steps

BASE = OptimConfig(lr=1.0, warmup=4, final_lr_share=0.1)
"""With `constant` the final share goes, which has no effect there."""
NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)


@pytest.mark.parametrize("name", NAMES)
def test_warm_up_rises_evenly_to_the_peak(name: ScheduleName) -> None:
    config = BASE.replace(schedule=name)
    assert [lr_at(s, 14, config) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("name", "middle"),
    [
        ("constant", 1.0),
        ("linear", 0.1 + 0.9 * 0.5),
        ("cosine", 0.1 + 0.9 * 0.5),
        ("quarter-cosine", 0.1 + 0.9 * math.sqrt(0.5)),
    ],
)
def test_half_way_between_warm_up_and_end(name: ScheduleName, middle: float) -> None:
    # 4 steps of warm-up and 10 of fall: step 8 is the fifth of ten.
    assert lr_at(8, 14, BASE.replace(schedule=name)) == pytest.approx(middle, rel=1e-12)


def test_a_fifth_of_the_way() -> None:
    expected = {
        "linear": 0.1 + 0.9 * 0.8,
        "cosine": 0.1 + 0.9 * (1 + math.cos(0.2 * math.pi)) / 2,
        "quarter-cosine": 0.1 + 0.9 * math.cos(0.1 * math.pi),
    }
    for name in ("linear", "cosine", "quarter-cosine"):
        found = lr_at(5, 14, BASE.replace(schedule=name))
        assert found == pytest.approx(expected[name], rel=1e-12)


def test_wsd_is_flat_and_then_falls_in_a_line() -> None:
    config = BASE.replace(schedule="wsd", decay_share=0.25)
    found = [lr_at(s, 20, config) for s in range(20)]
    assert found[3:15] == [1.0] * 12
    assert found[15:] == pytest.approx([0.82, 0.64, 0.46, 0.28, 0.1], rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_the_last_step_has_exactly_the_final_share(name: ScheduleName) -> None:
    final = 1.0 if name == "constant" else 0.1
    config = BASE.replace(schedule=name)
    assert lr_at(13, 14, config) == final
    assert lr_at(40, 14, config) == final  # a run continued past its end stays there


def test_the_published_quarter_cosine() -> None:
    """Account 002: 5e-4 to 5e-5 over 100,000 steps, 2000 of them warm-up."""
    config = OptimConfig(lr=5e-4, warmup=2000, schedule="quarter-cosine", final_lr_share=0.1)
    assert lr_at(1999, 100_000, config) == 5e-4
    assert lr_at(50_999, 100_000, config) == pytest.approx(5e-5 + 4.5e-4 * math.sqrt(0.5), rel=1e-9)
    assert lr_at(99_999, 100_000, config) == pytest.approx(5e-5, rel=1e-12)


def test_warm_up_by_share_and_by_number() -> None:
    assert warmup_steps(OptimConfig(warmup=0.2), 7075) == 1415
    assert warmup_steps(OptimConfig(warmup=500), 7075) == 500
    assert warmup_steps(OptimConfig(warmup=500), 20) == 20
    assert warmup_steps(OptimConfig(), 20) == 0


def test_a_run_of_one_step_learns_at_the_peak() -> None:
    assert lr_at(0, 1, OptimConfig(lr=0.5, schedule="linear")) == 0.5


@given(
    name=st.sampled_from(NAMES),
    total=st.integers(2, 400),
    warmup=st.integers(0, 500),
    share=st.floats(0, 1),
    decay=st.floats(0, 1),
)
def test_never_above_the_peak_never_below_the_end_and_one_rise_one_fall(
    name: ScheduleName, total: int, warmup: int, share: float, decay: float
) -> None:
    share = 1.0 if name == "constant" else share
    ends = {} if name == "constant" else {"final_lr_share": share}
    ends |= {"decay_share": decay} if name == "wsd" else {}
    config = OptimConfig(lr=2.0, schedule=name, warmup=warmup, **ends)
    rates = [lr_at(s, total, config) for s in range(total)]
    rise = min(warmup, total)
    assert all(0 < rate <= 2.0 for rate in rates[:rise])
    assert all(2.0 * share - 1e-12 <= rate <= 2.0 for rate in rates[rise:])
    assert rates[:rise] == sorted(rates[:rise])
    assert rates[rise:] == sorted(rates[rise:], reverse=True)
