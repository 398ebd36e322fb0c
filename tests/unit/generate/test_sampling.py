"""Filters against brute force, draws against their distribution, keys against their batch."""

import re
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foundling.config.errors import ConfigError
from foundling.generate.sampling import (
    NO_TOKEN,
    Sampling,
    adjust,
    derived_seed,
    draw,
    draw_filtered,
    draw_greedy,
    filter_ordered,
    gumbel,
)

# Few distinct values, so that ties are common.
LOGITS = st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 0.6, 2.0]), min_size=1, max_size=12)


def kept(values: list[float], k: int = 0, p: float = 1.0, floor: float = 0.0) -> list[bool]:
    """Which of some values, the largest first, a filter leaves."""
    logits = torch.tensor([sorted(values, reverse=True)])
    limits = (torch.tensor([[limit]]) for limit in (k or len(values), p, floor))
    return filter_ordered(logits, *limits)[0].isfinite().tolist()


@given(values=LOGITS, k=st.integers(1, 15))
def test_top_k_keeps_the_k_largest(values: list[float], k: int) -> None:
    assert kept(values, k=k) == [place < k for place in range(len(values))]


@given(values=LOGITS, p=st.floats(0.01, 0.99))
def test_top_p_keeps_the_fewest_that_reach_p(values: list[float], p: float) -> None:
    shares = torch.tensor(sorted(values, reverse=True)).softmax(-1).tolist()
    held, wanted = 0.0, []
    for share in shares:
        if abs(held - p) < 1e-5:
            return  # a sum exactly at p is rounding's to decide
        wanted.append(held < p)
        held += share
    assert kept(values, p=p) == wanted


@given(values=LOGITS, floor=st.floats(0.0, 1.0))
def test_min_p_keeps_what_is_near_the_largest(values: list[float], floor: float) -> None:
    shares = torch.tensor(sorted(values, reverse=True)).softmax(-1)
    wanted = (shares >= floor * shares.max()).tolist()
    assert kept(values, floor=floor) == wanted
    assert any(wanted)


def test_filters_apply_one_after_the_other() -> None:
    values = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    # Of the two that top-k leaves, 0.4 / 0.7 = 0.571 is enough for top-p 0.55 but not for 0.6.
    assert kept(values, k=2, p=0.55) == [True, False, False, False]
    assert kept(values, k=2, p=0.6) == [True, True, False, False]


def keys(count: int, temperature: float = 1.0, seed: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    return torch.full((count,), temperature), torch.full((count,), seed), torch.arange(count)


PROBS = [0.5, 0.25, 0.0, 0.15, 0.1]


def chi2(ids: list[int], probs: list[float]) -> float:
    seen, n = Counter(ids), len(ids)
    assert all(probs[id] for id in seen)
    return sum((seen[id] - n * p) ** 2 / (n * p) for id, p in enumerate(probs) if p)


def test_draws_follow_the_distribution() -> None:
    n = 20_000
    logits = torch.tensor([PROBS]).log().expand(n, -1)
    assert chi2(draw(logits, *keys(n)).tolist(), PROBS) < 16.3  # 3 degrees, one in a thousand
    filtered = draw_filtered(logits, [Sampling(temperature=1.0, top_k=3, seed=11)] * n, keys(n)[2])
    assert chi2(filtered.tolist(), [0.5 / 0.9, 0.25 / 0.9, 0, 0.15 / 0.9, 0]) < 13.8


def test_a_large_vocabulary_is_drawn_evenly() -> None:
    n, size = 1000, 50_000
    ids = draw(torch.zeros(1, size).expand(n, -1), *keys(n)).float()
    assert abs(float(ids.mean()) / size - 0.5) < 0.02
    assert len(set(ids.tolist())) > 0.9 * n


def test_temperature_divides_the_logits() -> None:
    n = 20_000
    logits = torch.tensor([PROBS]).log().expand(n, -1)
    squared = [p * p / sum(q * q for q in PROBS) for p in PROBS]
    assert chi2(draw(logits, *keys(n, temperature=0.5)).tolist(), squared) < 16.3


def test_neighbouring_keys_are_unrelated() -> None:
    ids = torch.arange(1000, dtype=torch.int32)
    noise = gumbel(torch.tensor([1, 2, 1, 1 << 40]), torch.tensor([7, 7, 8, 7]), ids)
    for row in noise[1:]:
        assert abs(float(torch.corrcoef(torch.stack((noise[0], row)))[0, 1])) < 0.1
    assert abs(float(torch.corrcoef(torch.stack((noise[0, 1:], noise[0, :-1])))[0, 1])) < 0.1
    assert noise.mean() == pytest.approx(0.5772, abs=0.06)  # Euler's constant


def test_the_noise_is_the_same_everywhere_and_for_good() -> None:
    # Seeds that people keep must go on meaning the same: recomputed by hand from the two mixers.
    found = gumbel(
        torch.tensor([5]), torch.tensor([9]), torch.tensor([0, 1, 70_000], dtype=torch.int32)
    )

    def mix(x: int, shifts: tuple[int, int, int], factors: tuple[int, int], bits: int) -> int:
        for shift, factor in zip(shifts, (*factors, 1), strict=True):
            x = (x ^ (x >> shift)) * factor % 2**bits
        return x

    wide = ((30, 27, 31), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB), 64)
    narrow = ((16, 13, 16), (0x85EBCA6B, 0xC2B2AE35), 32)
    key = mix(5 ^ mix(9 + 0x9E3779B97F4A7C15, *wide), *wide)
    for id, value in zip((0, 1, 70_000), found[0].tolist(), strict=True):
        hashed = mix((id * 0x9E3779B1 + key) % 2**32, *narrow)
        hashed = mix(hashed ^ (key >> 32), *narrow)
        uniform = ((hashed & 0x7FFFFFFF) + 0.5) / 2**31
        wanted = -torch.tensor(uniform, dtype=torch.float64).neg().log1p().neg().log()
        assert value == pytest.approx(float(wanted), rel=1e-5, abs=1e-5)


def test_a_rows_draw_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    some = [Sampling(temperature=1.3, top_p=0.9, seed=seed) for seed in range(6)]
    places = torch.full((6,), 9)
    together = draw_filtered(logits, some, places).tolist()
    alone = [int(draw_filtered(logits[i : i + 1], some[i : i + 1], places[:1])) for i in range(6)]
    assert together == alone
    assert draw_filtered(logits, some, places + 1).tolist() != together


@settings(max_examples=50, deadline=None)
@given(values=LOGITS, temperature=st.sampled_from([0.0, 1e-6, 0.3, 5.0]), seed=st.integers(0, 99))
def test_filters_that_keep_all_change_no_draw(
    values: list[float], temperature: float, seed: int
) -> None:
    logits, place = torch.tensor([values]), torch.tensor([3])
    plain = draw(logits, torch.tensor([temperature]), torch.tensor([seed]), place)
    sampling = Sampling(temperature=temperature, seed=seed)
    [filtered] = draw_filtered(logits, [sampling], place).tolist()
    # The same noise: equal but for rounding, and for equal logits at temperature 0.
    assert values[filtered] == pytest.approx(values[int(plain)])


def test_greedy_takes_the_most_likely() -> None:
    assert draw_greedy(torch.tensor([[0.1, 3.0, 2.9]])).tolist() == [1]
    assert draw(torch.tensor([[0.1, 3.0, 2.9]]), *keys(1, temperature=0.0)).tolist() == [1]


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_draw_no_token(broken: float) -> None:
    logits = torch.tensor([[0.0, broken, 1.0], [0.0, float("-inf"), 1.0]])
    assert draw_greedy(logits).tolist() == [NO_TOKEN, 2]
    assert draw(logits, *keys(2)).tolist()[0] == NO_TOKEN
    assert draw(torch.full((1, 3), float("-inf")), *keys(1)).tolist() == [NO_TOKEN]


def test_penalties_and_biases() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, 1.0, 0.0])
    sampling = Sampling(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={4: 3.0}
    )
    adjust(logits, sampling, prompt=[0, 1], generated=[2, 2])
    assert logits.tolist() == [1.0, -4.0, 0.5 - 0.5 - 0.5, 1.0, 3.0]


def test_derived_seeds_differ_and_the_first_is_the_seed_itself() -> None:
    seeds = [derived_seed(7, number) for number in range(100)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 100


REFUSED: list[tuple[str, Any]] = [
    ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")),
    ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1), ("min_p", 2.0), ("top_p", float("nan")),
    ("repetition_penalty", 0.0), ("presence_penalty", float("nan")),
    ("frequency_penalty", float("inf")), ("frequency_penalty", 1e39), ("presence_penalty", -1e39),
    ("repetition_penalty", 1e-45), ("temperature", 1e39),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_an_impossible_setting_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{field} is {value}")):
        Sampling(**{"temperature": 1.0, field: value})


def test_a_bias_must_be_finite_and_a_filter_needs_a_temperature() -> None:
    for bias in (float("nan"), 1e39):
        with pytest.raises(ConfigError, match=re.escape(f"logit_bias of token 3 is {bias}")):
            Sampling(logit_bias={3: bias})
    with pytest.raises(ConfigError, match="temperature 0"):
        Sampling(top_k=5)
