"""The order: a function of (seed, segments, sample) that loses and repeats nothing."""

import json
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundling.config.errors import DataError
from foundling.config.mixture import SLOTS, slot_counts, slot_table
from foundling.data.order import Order, UnitRef
from foundling.data.permutation import permute, round_keys
from foundling.data.segments import Segment

WEIGHTS = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6)


def segment(sizes: list[int], shares: list[float], **changes: object) -> Segment:
    names = [f"s{number}" for number in range(len(sizes))]
    fields: dict[str, object] = {
        "first_sample": 0,
        "digests": {name: f"digest of {name}" for name in names},
        "weights": dict(zip(names, shares, strict=True)),
        "units": dict(zip(names, sizes, strict=True)),
        "seq_len": 32,
        "packing": "concat",
        "rows_per_step": 1,
        "first_step": changes.get("first_sample", 0),
    }
    return Segment(**{**fields, **changes})  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3000), st.integers())
def test_the_shuffle_is_a_bijection_of_every_size(size: int, key: int) -> None:
    moved = permute(np.arange(size, dtype=np.int64), size, round_keys(key))
    assert sorted(moved.tolist()) == list(range(size))


def test_the_shuffle_shuffles_and_depends_on_its_key() -> None:
    index = np.arange(10_000, dtype=np.int64)
    one, two = (permute(index, 10_000, round_keys("k", n)) for n in (1, 2))
    for moved in (one, two):
        # Neighbours end up about a third of the range apart, and nothing leans to its old place.
        assert 3000 < np.abs(np.diff(moved)).mean() < 3700
        assert abs(np.corrcoef(index, moved)[0, 1]) < 0.05
    assert np.count_nonzero(one == two) < 20


@settings(max_examples=15, deadline=None)
@given(WEIGHTS)
def test_shares_are_exact_to_one_slot_at_every_prefix(weights: list[float]) -> None:
    counts = slot_counts({f"s{number}": weight for number, weight in enumerate(weights)})
    table = np.frombuffer(slot_table(counts), np.uint16)
    time_ = np.arange(1, SLOTS + 1)
    assert len(table) == SLOTS
    for number, count in enumerate(counts.values()):
        had = np.cumsum(table == number)
        assert had[-1] == count
        assert np.abs(had - time_ * count / SLOTS).max() < 1


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**63),
    sources=st.lists(st.tuples(st.integers(1, 50), st.floats(0.05, 1.0)), min_size=1, max_size=4),
    begin=st.sampled_from([0, SLOTS - 1500, 2 * SLOTS - 700, 10**9]),
    first=st.integers(0, 200_000),
)
def test_every_epoch_visits_every_unit_once(
    seed: int, sources: list[tuple[int, float]], begin: int, first: int
) -> None:
    units, weights = ([*column] for column in zip(*sources, strict=True))
    order = Order(seed, [segment(units, weights)])
    at = order.locate_range(begin, 3000)
    consumed = order.consumed(begin)
    for number, size in enumerate(units):
        mine = at.sources == number
        epochs, found = at.epochs[mine], at.units[mine]
        # Turns follow each other without a gap, also where the table of slots starts again.
        turns = consumed[f"s{number}"] + np.arange(len(epochs))
        assert (epochs == turns // size).all()
        for epoch in np.unique(epochs).tolist():
            seen = Counter(found[epochs == epoch].tolist())
            assert max(seen.values()) == 1
            if epochs[0] < epoch < epochs[-1]:
                assert set(seen) == set(range(size))
    # Any stretch is found alike from anywhere, one by one or together, and counted alike.
    far = order.locate_range(first, 40)
    for offset in (0, 17, 39):
        name = far.names[far.sources[offset]]
        ref = UnitRef(name, int(far.epochs[offset]), int(far.units[offset]))
        assert order.locate(first + offset) == ref
    brute = Counter(at.names[number] for number in at.sources.tolist())
    reached = order.consumed(begin + 3000)
    assert {name: reached[name] - consumed[name] for name in order.names} == {
        name: brute[name] for name in order.names
    }
    before, after = order.consumed(first), order.consumed(first + 40)
    stretch = Counter(far.names[number] for number in far.sources.tolist())
    assert {name: after[name] - before[name] for name in order.names} == {
        name: stretch[name] for name in order.names
    }


def test_order_depends_on_seed_epoch_and_content_but_not_on_the_order_of_names() -> None:
    base = segment([500, 300], [0.7, 0.3])
    at = Order(1, [base]).locate_range(0, 400)
    other = Order(2, [base]).locate_range(0, 400)
    assert (at.sources == other.sources).all()
    assert np.count_nonzero(at.units == other.units) < 20
    mirrored = segment([500, 300], [0.7, 0.3], weights={"s1": 0.3, "s0": 0.7})
    same = Order(1, [mirrored]).locate_range(0, 400)
    assert (at.units == same.units).all()
    assert (at.sources == same.sources).all()
    one = Order(1, [segment([400], [1.0])])
    assert (one.locate_range(0, 400).units != one.locate_range(400, 400).units).any()


def test_seeking_a_trillion_samples_ahead_costs_nothing() -> None:
    order = Order(3, [segment([488_281_250, 10**9], [0.4, 0.6])])
    order.locate_range(0, 1)
    start = time.thread_time()
    at = order.locate_range(10**12, 64)
    assert time.thread_time() - start < 0.05
    assert len(set(zip(at.sources.tolist(), at.units.tolist(), strict=True))) == 64


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 400), WEIGHTS, WEIGHTS)
def test_reweighting_goes_on_where_each_source_was(
    seed: int, turn: int, before: list[float], after: list[float]
) -> None:
    kept = min(len(before), len(after))
    first = segment([37] * len(before), before)
    second = segment([37] * len(after), after, first_sample=turn)
    order = Order(seed, [first, second])
    old = Order(seed, [first]).locate_range(0, turn)
    at = order.locate_range(0, 1500)
    assert (at.units[:turn] == old.units).all()
    for number in range(kept):
        mine = at.sources == order.names.index(f"s{number}")
        pairs = list(zip(at.epochs[mine].tolist(), at.units[mine].tolist(), strict=True))
        assert len(set(pairs)) == len(pairs)
        epochs = [epoch for epoch, _ in pairs]
        assert epochs == sorted(epochs)
        for epoch in range(epochs[-1] if epochs else 0):
            assert epochs.count(epoch) == 37
    brute = Counter(at.names[source] for source in at.sources.tolist())
    assert order.consumed(1500) == {name: brute[name] for name in order.names}


@pytest.mark.parametrize(
    "change",
    [
        {"seq_len": 64, "units": {"s0": 50}},
        {"packing": "bestfit"},
        {"digests": {"s0": "grown"}, "units": {"s0": 130}},
    ],
)
def test_another_cut_starts_the_next_epoch(change: dict[str, object]) -> None:
    first = segment([100], [1.0])
    order = Order(5, [first, segment([100], [1.0], first_sample=130, **change)])
    assert order.locate(129).epoch == 1
    assert order.locate(130).epoch == 2
    size = order.segments[1].units["s0"]
    later = order.locate_range(130, size)
    assert set(later.units.tolist()) == set(range(size))
    assert set(later.epochs.tolist()) == {2}


def test_a_source_that_pauses_goes_on_where_it_was() -> None:
    both, one = [0.5, 0.5], segment([40], [1.0], first_sample=20)
    order = Order(1, [segment([40, 40], both), one, segment([40, 40], both, first_sample=60)])
    at = order.locate_range(0, 120)
    second = at.units[at.sources == 1]
    assert sorted(second.tolist()) == list(range(40))


def test_segments_survive_json() -> None:
    made = segment([3, 4], [0.25, 0.75])
    assert Segment.from_json(json.loads(json.dumps(made.to_json()))) == made


@pytest.mark.parametrize("firsts", [[], [5], [0, 7, 7], [0, 9, 4]])
def test_segments_out_of_order_are_refused(firsts: list[int]) -> None:
    with pytest.raises(DataError, match="segments start at"):
        Order(1, [segment([3], [1.0], first_sample=first) for first in firsts])


def test_a_source_without_units_is_refused() -> None:
    with pytest.raises(DataError, match="s1 holds no units"):
        Order(1, [segment([3, 0], [0.5, 0.5])])
