"""Reading a data set that is still being built: the order is a function of what was there."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from eaters import (
    STEP_TOKENS,
    assert_counted,
    assert_loaded,
    assert_nothing_is_lost,
    assert_nothing_repeats,
    assert_shares,
    eat,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from unique_data import write_data

from foundling.config.data import DataConfig, PhaseConfig
from foundling.config.data_manifest import Manifest
from foundling.config.errors import DataError
from foundling.data.batch_reader import BatchReader
from foundling.data.dataset import DataSet
from foundling.data.order import Order, reopen_order
from foundling.data.segments import Segment

SHARDS = [[7, 3, 12, 9, 5], [20, 4], [6] * 8, [30, 2, 2], [11, 9, 8], [5] * 6]
FIXED = {"seed": 3, "seq_len": 8, "steps": 40, "global_batch_tokens": STEP_TOKENS}


def grow(folder: Path, whole: Manifest, shards: int) -> None:
    """The manifest as the build leaves it after so many shards."""
    complete = shards == len(whole.train)
    replace(whole, train=whole.train[:shards], complete=complete).save(folder)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DataSet]:
    folder = tmp_path_factory.mktemp("built")
    return {
        "grows": write_data(folder / "grows", SHARDS, name="grows", first_id=1),
        "still": write_data(folder / "still", [[9] * 12, [4] * 20], name="still", first_id=9000),
    }


def through_json(order: Order) -> list[Segment]:
    return [Segment.from_json(json.loads(json.dumps(s.to_json()))) for s in order.segments]


def follow(
    built: dict[str, DataSet], data: DataConfig, waves: Sequence[int], early: Sequence[int]
) -> tuple[Order, dict[str, DataSet]]:
    """Read as the source grows: some steps short of what is known, look again."""
    folder, whole = built["grows"].folder, built["grows"].manifest
    grow(folder, whole, waves[0])
    sources = {"grows": DataSet(folder, follow=True), "still": built["still"]}
    order, step = reopen_order((), sources, data, step=0, **FIXED), 0
    for shards, short in zip([*waves[1:], len(SHARDS)], early, strict=False):
        known = order.steps_known()
        assert known is not None
        eaten = eat(order, sources, known + 1)
        epochs = [{s.epoch for s in row if s.source == "grows"} for row in eaten]
        assert all(found <= {0} for found in epochs[:known])
        assert 1 in epochs[known]
        step = max(step, known - short)
        grow(folder, whole, shards)
        assert sources["grows"].refresh()
        later = reopen_order(through_json(order), sources, data, step=step, **FIXED)
        assert eat(later, sources, step) == eaten[:step]
        order = later
    return order, sources


@settings(max_examples=10, deadline=None)
@given(
    waves=st.lists(st.integers(1, 5), min_size=1, max_size=4, unique=True).map(sorted),
    early=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    weight=st.sampled_from([0.3, 1.0, 4.0]),
    packing=st.sampled_from(["concat", "bestfit", "pad"]),
    by=st.sampled_from(["rows", "tokens"]),
    world=st.sampled_from([1, 3]),
)
def test_a_followed_source_is_read_once_whatever_the_waves(
    built: dict[str, DataSet],
    waves: list[int],
    early: list[int],
    weight: float,
    packing: str,
    by: str,
    world: int,
) -> None:
    data = DataConfig(
        sources={"grows": weight, "still": 1},
        packing=packing,  # type: ignore[arg-type]
        weights_by=by,  # type: ignore[arg-type]
        follow=1,
    )
    order, sources = follow(built, data, waves, early)
    assert sources["grows"].is_complete
    assert order.steps_known() is None
    assert order.left_unread() == ()
    eaten = eat(order, sources, FIXED["steps"])
    assert_nothing_repeats(eaten)
    assert_nothing_is_lost(eaten, sources)
    assert_shares(order, eaten)
    assert_counted(order, eaten)
    assert_loaded(order, sources, eaten, world)
    # Every token of the source is in epoch 0 once the next has begun: no wave lost its rest.
    read = {
        t for row in eaten for s in row if (s.source, s.epoch) == ("grows", 0) for t in s.tokens
    }
    if any((s.source, s.epoch) == ("grows", 1) for row in eaten for s in row):
        assert read == set(range(1, sum(map(sum, SHARDS)) + 1))
    # A later resume that finds everything as it was changes nothing.
    again = reopen_order(through_json(order), sources, data, step=30, **FIXED)
    assert again.segments == order.segments


def test_phases_of_a_growing_source_take_what_has_come(built: dict[str, DataSet]) -> None:
    data = DataConfig(
        sources={"grows": 1, "still": 20},
        packing="pad",
        follow=1,
        phases=(PhaseConfig(at=20, seq_len=16),),
    )
    order, sources = follow(built, data, [4, 5], [2, 1])
    assert [s.seq_len for s in order.segments][-1] == 16
    spans = [s.shards["grows"] for s in order.segments if s.seq_len == 16]
    assert spans == [(0, len(SHARDS))]
    eaten = eat(order, sources, 40)
    assert_nothing_repeats(eaten)
    assert_counted(order, eaten)


def test_an_unfinished_data_set_is_refused_unless_it_is_followed(
    built: dict[str, DataSet],
) -> None:
    folder, whole = built["grows"].folder, built["grows"].manifest
    grow(folder, whole, 2)
    with pytest.raises(DataError, match=r"still being built; wait for its build, or set data\.fol"):
        DataSet(folder)
    followed = DataSet(folder, follow=True)
    assert not followed.is_complete
    assert not followed.refresh()
    span, digest = (0, 2), followed.digest_of((0, 2))
    grow(folder, whole, 4)
    assert followed.refresh()
    assert followed.digest_of(span) == digest
    assert followed.digest_of((2, 4)) != digest
    # Shards that were there must stay as they were.
    replace(whole, train=whole.train[1:4], complete=False).save(folder)
    with pytest.raises(DataError, match="was built anew while it was followed"):
        followed.refresh()
    grow(folder, whole, len(SHARDS))
    assert DataSet(folder).is_complete


def test_a_loader_refuses_shards_that_are_not_those_of_the_order(
    built: dict[str, DataSet], tmp_path: Path
) -> None:
    data = DataConfig(sources={"grows": 1}, follow=1)
    order, _ = follow(built, data, [3], [0])
    other = {"grows": write_data(tmp_path, [*SHARDS[:2], [8], *SHARDS[3:]])}
    with pytest.raises(DataError, match="grows is not the data set the order was made for"):
        BatchReader(other, order, micro_tokens=16)
