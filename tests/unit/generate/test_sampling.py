"""Filters against brute force, draws against their distribution, keys against their batch."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundling.config.errors import ConfigError
from foundling.generate.sampling import (
    Sampling,
    choose,
    min_p_mask,
    pick,
    probabilities,
    top_k_mask,
    top_p_mask,
    uniform,
)

# Few distinct values, so that ties are common.
LOGITS = st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 0.6, 2.0]), min_size=1, max_size=12)


def by_likelihood(values: list[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


@given(values=LOGITS, k=st.integers(1, 15))
def test_top_k_keeps_the_k_largest(values: list[float], k: int) -> None:
    kept = set(by_likelihood(values)[:k])
    mask = top_k_mask(torch.tensor([values]), k)[0].tolist()
    assert mask == [i in kept for i in range(len(values))]
    assert top_k_mask(torch.tensor([values]), 10**30).all()


@given(values=LOGITS, p=st.floats(0.01, 1.0))
def test_top_p_keeps_the_fewest_that_reach_p(values: list[float], p: float) -> None:
    probs = torch.tensor([values], dtype=torch.float64).softmax(-1)
    kept: set[int] = set()
    held = 0.0
    for i in by_likelihood(probs[0].tolist()):
        if held >= p - 1e-12 and abs(held - p) > 1e-12:
            break
        if abs(held - p) <= 1e-12:
            return  # a sum exactly at p is rounding's to decide
        kept.add(i)
        held += float(probs[0, i])
    mask = top_p_mask(probs, p)[0].tolist()
    assert mask == [i in kept for i in range(len(values))]


@given(values=LOGITS, p=st.floats(0.0, 1.0))
def test_min_p_keeps_what_is_near_the_largest(values: list[float], p: float) -> None:
    probs = torch.tensor([values], dtype=torch.float64).softmax(-1)[0].tolist()
    mask = min_p_mask(torch.tensor([probs], dtype=torch.float64), p)[0].tolist()
    assert mask == [q >= p * max(probs) for q in probs]
    assert any(mask)


@settings(max_examples=50)
@given(
    values=LOGITS,
    temperature=st.sampled_from([1e-6, 0.3, 1.0, 5.0]),
    k=st.integers(0, 5),
    p=st.sampled_from([0.3, 0.9, 1.0]),
    floor=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_the_distribution_is_whole_and_its_best_token_stays(
    values: list[float], temperature: float, k: int, p: float, floor: float
) -> None:
    sampling = Sampling(temperature=temperature, top_k=k, top_p=p, min_p=floor)
    probs = probabilities(torch.tensor([values]), sampling)[0]
    assert float(probs.sum()) == pytest.approx(1.0)
    assert probs[by_likelihood(values)[0]] > 0
    assert int((probs > 0).sum()) <= (k or len(values))


def test_filters_apply_one_after_the_other() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of the two that top-k leaves, 0.4 / 0.7 = 0.571 is enough for top-p 0.55 but not for 0.6.
    one = probabilities(logits, Sampling(temperature=1.0, top_k=2, top_p=0.55))[0]
    two = probabilities(logits, Sampling(temperature=1.0, top_k=2, top_p=0.6))[0]
    assert one.tolist() == pytest.approx([1, 0, 0, 0])
    assert two.tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])


def test_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64)
    probs = probabilities(logits, Sampling(temperature=0.5))
    assert torch.allclose(probs, (logits * 2).softmax(-1))


def test_draws_follow_the_distribution() -> None:
    probs = [0.5, 0.25, 0.0, 0.15, 0.1]
    logits = torch.tensor([probs]).log()
    n = 20_000
    sampling = Sampling(temperature=1.0, seed=11)
    ids = choose(logits.expand(n, -1), sampling, [0] * n, range(n)).tolist()
    seen = Counter(ids)
    chi2 = sum((seen[i] - n * p) ** 2 / (n * p) for i, p in enumerate(probs) if p)
    assert seen[2] == 0
    assert chi2 < 16.3  # 3 degrees of freedom, one in a thousand


def test_neighbouring_keys_are_unrelated() -> None:
    n = 4000
    for step in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        a = torch.tensor([uniform(i, 7, i) for i in range(n)])
        b = torch.tensor([uniform(i + step[0], 7 + step[1], i + step[2]) for i in range(n)])
        assert abs(float(torch.corrcoef(torch.stack((a, b)))[0, 1])) < 0.06
        assert abs(float(a.mean()) - 0.5) < 0.02


def test_a_rows_draw_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(temperature=1.3, top_p=0.9, seed=4)
    together = choose(logits, sampling, range(6), [9] * 6).tolist()
    alone = [choose(logits[i : i + 1], sampling, [i], [9]).item() for i in range(6)]
    assert together == alone
    assert choose(logits, sampling, range(6), [10] * 6).tolist() != together


def test_the_ends_of_the_number_line_pick_possible_tokens() -> None:
    probs = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]], dtype=torch.float64)
    ends = torch.tensor([0.0, 1 - 2**-40], dtype=torch.float64)
    assert [int(pick(probs, ends[i : i + 1])) for i in range(2)] == [1, 3]


def test_greedy_takes_the_most_likely() -> None:
    assert choose(torch.tensor([[0.1, 3.0, 2.9]]), Sampling(), [0], [0]).tolist() == [1]


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.1), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1), ("min_p", 2.0)],
)
def test_an_impossible_setting_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field} is {value}"):
        Sampling(**{"temperature": 1.0, field: value})  # type: ignore[arg-type]


def test_a_filter_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match="temperature 0"):
        Sampling(top_k=5)
