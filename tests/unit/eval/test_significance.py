"""The p-values, intervals and sample sizes, each against something known."""

import itertools
import math
from typing import Any

import numpy as np
import pytest

from foundling.eval import significance
from foundling.eval.significance import (
    SEEN,
    PairedScores,
    holm,
    interval,
    over_seeds,
    p_value,
    t_tails,
    times_as_many,
)
from tests.unit.eval.compare_samples import equal_models


def pairs(a: Any, b: Any, weight: Any = None) -> PairedScores:
    heavy = np.ones(len(a)) if weight is None else np.asarray(weight, float)
    return PairedScores(np.asarray(a, float), np.asarray(b, float), heavy)


def by_hand(parts: Any) -> float:
    """Every pattern of signs, counted."""
    seen = abs(sum(parts))
    sums = [
        abs(sum(s * p for s, p in zip(signs, parts, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(parts))
    ]
    beyond = sum(value > seen + 1e-9 for value in sums)
    return (beyond + sum(abs(value - seen) <= 1e-9 for value in sums) / 2) / len(sums)


@pytest.mark.parametrize(
    "parts",
    [[1, 1, 1, 1, 1, -1], [0.5] * 8, [0.1, -0.2, 0.3, 0.3, 0.7], [3, 0, 0, -3], [1 / 3, 0.2, 0.2]],
)
def test_p_is_the_share_of_all_sign_patterns(parts: list[float]) -> None:
    assert p_value(np.array(parts, float)) == pytest.approx(by_hand(parts), abs=1e-12)


def test_p_by_drawing_is_p_by_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    parts = np.concatenate([rng.normal(0.3, 1, 9), [0.5] * 4])
    exact = p_value(parts)
    monkeypatch.setattr(significance, "ALL_PATTERNS", 2)
    assert p_value(parts) == pytest.approx(exact, abs=0.01)
    monkeypatch.setattr(significance, "MANY", 3)  # and by the normal distribution, which is near
    assert p_value(parts) == pytest.approx(exact, abs=0.05)


def test_rounding_of_the_weights_decides_nothing() -> None:
    assert 0.1 + 0.2 != 0.3
    parts = np.array([0.1 + 0.2, 0.3] * 12) * np.array([1, 1, 1, -1] * 6)
    assert p_value(parts) == pytest.approx(p_value(np.sign(parts)), rel=1e-9)


def test_equals_are_equal_and_opposites_are_not() -> None:
    same = np.random.default_rng(0).random(50)
    assert p_value(pairs(same, same).parts) == 1.0
    assert p_value(pairs(np.zeros(50), np.ones(50)).parts) < 1e-14
    assert p_value(pairs(np.zeros(500), same.repeat(10)).parts) < 0.001


def test_equal_models_are_told_apart_one_time_in_twenty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(significance, "DRAWS", 2000)
    rng = np.random.default_rng(12)
    tasks = ((60, 0.3), (150, 0.5), (400, 0.8))
    alone = together = 0
    for _ in range(300):
        both = [pairs(*equal_models(rng, n, ease)).parts for n, ease in tasks]
        alone += p_value(both[1]) < 0.05
        together += p_value(np.concatenate(both) / 3) < 0.05
    # 300 tries at 5%: fewer than 5 or more than 27 happen once in a thousand.
    assert 5 <= alone <= 27
    assert 5 <= together <= 27


def test_weighted_means_and_their_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(significance, "RESAMPLES", 1000)
    rng = np.random.default_rng(4)
    covered = 0
    for _ in range(60):
        weight = rng.lognormal(5, 0.8, 80)
        a = rng.normal(1.0, 0.2, 80)
        found = pairs(a, a - 0.01 + rng.normal(0, 0.05, 80), weight)
        low, high = interval([found])
        covered += low < -0.01 < high
        assert low < found.difference < high
    assert 50 <= covered <= 60
    one = pairs([0.0, 1.0], [1.0, 1.0], [3, 1])
    assert (one.mean_a, one.mean_b, one.difference) == pytest.approx((0.25, 1.0, 0.75))


def test_the_standard_error_is_the_textbook_one() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.random(40), rng.random(40)
    expected = np.std(b - a, ddof=1) / math.sqrt(40)
    assert pairs(a, b).stderr == pytest.approx(expected)
    assert math.isnan(pairs([1.0], [0.0]).stderr)
    assert math.isnan(interval([pairs([1.0], [0.0])])[0])


def test_so_many_examples_do_show_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(significance, "DRAWS", 1000)
    rng = np.random.default_rng(9)
    gap, sd = 0.1, 0.6
    stderr = sd / math.sqrt(100)
    times = times_as_many(gap, stderr)
    assert times == pytest.approx((SEEN * 0.06 / 0.1) ** 2)
    n = math.ceil(100 * times)
    seen = sum(p_value(rng.normal(gap, sd, n) / n) < 0.05 for _ in range(100))
    assert 68 <= seen <= 92  # four of five
    assert times_as_many(0.0, 0.1) is None
    assert times_as_many(1e-17, 0.1) is None


def test_as_many_gained_as_lost_is_no_difference_at_all() -> None:
    a = np.array([1.0] * 7 + [0.0] * 7 + [1.0] * 86)
    b = np.array([0.0] * 7 + [1.0] * 7 + [1.0] * 86)
    for order in (np.arange(100), np.random.default_rng(1).permutation(100)):
        pairs = PairedScores(a[order], b[order], np.ones(100))
        assert pairs.difference == 0.0


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]


def test_seeds_are_tested_by_welch() -> None:
    # Student's distribution with two degrees of freedom has a closed form.
    assert t_tails(2.0, 2) == pytest.approx(1 - 2 / math.sqrt(6), abs=1e-6)
    assert t_tails(0.0, 5) == pytest.approx(1.0)
    assert t_tails(2.228, 10) == pytest.approx(0.05, abs=1e-4)
    found = over_seeds([0.50, 0.52, 0.51], [0.53, 0.55, 0.54])
    assert found is not None
    assert found.difference == pytest.approx(0.03)
    assert found.sd == pytest.approx(0.01)
    assert found.p == pytest.approx(0.0213, abs=1e-3)
    assert found.needed == math.ceil(2 * (SEEN / 3) ** 2 + 1)
    assert over_seeds([0.5], [0.6, 0.7]) is None
