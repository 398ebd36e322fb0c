"""Batches left out: a mapping that loses nothing, repeats nothing and never moves the past."""

import json
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundling.data.segments import Skips

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 6)), max_size=8)


def made(pairs: list[tuple[int, int]]) -> Skips:
    skips = Skips()
    for first, length in pairs:
        skips = skips.plus(first, first + length)
    return skips


def left_out(pairs: list[tuple[int, int]]) -> set[int]:
    return {first + more for first, length in pairs for more in range(length)}


@given(RANGES)
def test_steps_read_what_is_not_left_out_in_order(pairs: list[tuple[int, int]]) -> None:
    skips, out = made(pairs), left_out(pairs)
    kept = list(islice((batch for batch in range(1000) if batch not in out), 120))
    assert [skips.batch_of(step) for step in range(120)] == kept
    assert [skips.step_of(batch) for batch in kept] == list(range(120))
    assert skips.total == len(out)


@given(RANGES)
def test_step_of_counts_what_was_read_before_any_batch(pairs: list[tuple[int, int]]) -> None:
    skips, out = made(pairs), left_out(pairs)
    for batch in range(80):
        assert skips.step_of(batch) == sum(b not in out for b in range(batch))


@given(RANGES, st.randoms(use_true_random=False))
def test_order_and_repetition_do_not_matter(pairs: list[tuple[int, int]], random: object) -> None:
    shuffled = [*pairs, *pairs]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert made(shuffled) == made(pairs)


@given(RANGES, st.integers(0, 40), st.integers(0, 5), st.integers(0, 5))
def test_what_is_left_out_later_does_not_move_the_past(
    pairs: list[tuple[int, int]], step: int, ahead: int, length: int
) -> None:
    skips = made(pairs)
    first = skips.batch_of(step) + ahead
    later = skips.plus(first, first + length)
    assert [later.batch_of(s) for s in range(step)] == [skips.batch_of(s) for s in range(step)]


@given(RANGES, st.integers(0, 30), st.integers(0, 50))
def test_stretches_are_the_same_batches(
    pairs: list[tuple[int, int]], first: int, count: int
) -> None:
    skips = made(pairs)
    runs = list(skips.stretches(first, first + count))
    batches = [batch for low, high in runs for batch in range(low, high)]
    assert batches == [skips.batch_of(step) for step in range(first, first + count)]
    assert all(low < high for low, high in runs)


@given(RANGES)
def test_json_and_back(pairs: list[tuple[int, int]]) -> None:
    skips = made(pairs)
    assert Skips.from_json(json.loads(json.dumps(skips.to_json()))) == skips


class Order:
    """Three units a batch, two of `a` and one of `b`; five from batch 10 on, all of `c`."""

    def sample_of(self, step: int) -> int:
        return 3 * min(step, 10) + 5 * max(0, step - 10)

    def consumed(self, samples: int) -> dict[str, int]:
        early, late = min(samples, 30), max(0, samples - 30)
        return {"a": early - early // 3, "b": early // 3, "c": late}


@given(RANGES, st.integers(0, 50))
def test_units_are_eaten_or_left_out_and_never_both(
    pairs: list[tuple[int, int]], step: int
) -> None:
    skips, order = made(pairs), Order()
    eaten, left = skips.units_read(order, step), skips.units(order, step)
    passed = order.consumed(order.sample_of(skips.batch_of(step)))
    assert {name: eaten[name] + left.get(name, 0) for name in passed} == passed
    by_hand = dict.fromkeys(passed, 0)
    for s in range(step):
        batch = skips.batch_of(s)
        before, after = (order.consumed(order.sample_of(b)) for b in (batch, batch + 1))
        for name in by_hand:
            by_hand[name] += after[name] - before[name]
    assert eaten == by_hand


@given(RANGES)
def test_what_is_left_out_is_ahead_of_exactly_one_step(pairs: list[tuple[int, int]]) -> None:
    skips, order = made(pairs), Order()
    total: dict[str, int] = {}
    for step in range(120):
        for name, count in skips.units_ahead_of(order, step).items():
            total[name] = total.get(name, 0) + count
    assert total == {name: n for name, n in skips.units(order, 120).items() if n}


def test_what_lies_ahead_of_a_step() -> None:
    skips = made([(2, 3), (9, 1)])
    assert [skips.ahead_of(step) for step in range(8)] == [
        None, None, (2, 5), None, None, None, (9, 10), None,
    ]  # fmt: skip


@pytest.mark.parametrize("ranges", [((3, 2),), ((1, 4), (4, 6)), ((5, 6), (1, 2)), ((-1, 2),)])
def test_ranges_that_are_none_are_refused(ranges: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="rising"):
        Skips(ranges)
