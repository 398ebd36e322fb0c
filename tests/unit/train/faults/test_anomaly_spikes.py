"""A spike is far above the median in robust spreads, and above everything in the window."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundling.train.faults.anomaly import SpikeDetector, robust_z

FLOATS = st.floats(-1e6, 1e6, allow_nan=False)


def test_the_score_is_the_distance_in_standard_deviations_of_a_normal_sample() -> None:
    rng = random.Random(3)
    window = [rng.gauss(5, 0.3) for _ in range(4001)]
    assert robust_z(5 + 0.3 * 8, window) == pytest.approx(8, rel=0.05)


def test_a_few_wild_values_do_not_move_it() -> None:
    rng = random.Random(4)
    window = [rng.gauss(5, 0.3) for _ in range(100)]
    wild = [*window, *[8.0] * 10]
    assert robust_z(9.0, wild) == pytest.approx(robust_z(9.0, window), rel=0.25)
    mean = sum(wild) / len(wild)
    sigma = math.sqrt(sum((x - mean) ** 2 for x in wild) / len(wild))
    assert (9.0 - mean) / sigma < 0.5 * robust_z(9.0, wild)  # the usual score is fooled


@given(st.lists(FLOATS, min_size=1, max_size=50), FLOATS)
def test_what_has_been_there_is_no_spike(window: list[float], value: float) -> None:
    z = robust_z(value, window)
    assert (z > 0) == (value > max(window))


@given(st.lists(st.floats(1, 10), min_size=1, max_size=50), st.floats(1, 20), st.floats(0.1, 100))
def test_the_unit_does_not_matter(window: list[float], value: float, unit: float) -> None:
    scaled = robust_z(value * unit, [x * unit for x in window], least_share=0.01)
    plain = robust_z(value, window, least_share=0.01)
    if abs(value - max(window)) > 1e-6:  # rounding decides which of two equal ones is larger
        assert scaled == pytest.approx(plain, rel=1e-6)


def filled(history: SpikeDetector, count: int, loss: float = 3.0) -> SpikeDetector:
    rng = random.Random(5)
    for _ in range(count):
        history.add(loss + rng.gauss(0, 0.02), math.exp(rng.gauss(0, 0.1)))
    return history


def test_nothing_is_judged_before_half_of_the_window_is_there() -> None:
    assert filled(SpikeDetector(64), 31).z(99.0, 1e9) == (0.0, 0.0)
    assert min(filled(SpikeDetector(64), 32).z(99.0, 1e9)) > 30


def test_norms_are_compared_by_factors() -> None:
    history = filled(SpikeDetector(64), 64)
    _, twice = history.z(3.0, 2.0)
    _, hundredfold = history.z(3.0, 100.0)
    assert 3 < twice < 15
    assert hundredfold == pytest.approx(twice * math.log(100) / math.log(2), rel=0.3)
    assert history.z(3.0, 0.0) == (history.z(3.0, 1.0)[0], 0.0)


def test_another_mixture_begins_a_new_history() -> None:
    history = filled(SpikeDetector(16), 16)
    history.reset_if_data_changed("")
    assert len(history) == 16
    history.reset_if_data_changed("longer rows")
    assert len(history) == 0
    assert history.z(99.0, 99.0) == (0.0, 0.0)


@given(st.lists(st.tuples(FLOATS, st.floats(0, 1e9)), max_size=40))
def test_it_comes_back_from_json_to_the_last_bit(pairs: list[tuple[float, float]]) -> None:
    history = SpikeDetector(24, mixture_digest="a")
    for pair in pairs:
        history.add(*pair)
    again = SpikeDetector.from_json(24, json.loads(json.dumps(history.to_json())))
    assert again.to_json() == history.to_json()
    assert again.z(1.5, 2.5) == history.z(1.5, 2.5)
    assert len(again) == min(len(pairs), 24)
