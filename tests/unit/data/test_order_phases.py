"""Mixtures, packings, phases, world sizes and resumes together, against brute force."""

import json
from pathlib import Path

import pytest
from eaters import (
    STEP_TOKENS,
    Eaten,
    assert_counted,
    assert_loaded,
    assert_nothing_is_lost,
    assert_nothing_repeats,
    assert_shares,
    configs,
    eat,
    worlds,
    write_sources,
)
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from unique_data import write_data

from foundling.config.data import DataConfig, PhaseConfig
from foundling.config.errors import ConfigError, DataError
from foundling.config.packing_spec import ALL_PARTS, PART_COUNT
from foundling.data.batch_reader import BatchReader
from foundling.data.dataset import DataSet
from foundling.data.order import Order, reopen_order
from foundling.data.segments import Segment

STEPS = 9
FIXED = {"seed": 3, "global_batch_tokens": STEP_TOKENS}


def through_json(order: Order) -> list[Segment]:
    """The segments as a checkpoint gives them back."""
    return [Segment.from_json(json.loads(json.dumps(s.to_json()))) for s in order.segments]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DataSet]:
    return write_sources(tmp_path_factory.mktemp("sources"))


def _opened(sources: dict[str, DataSet], data: DataConfig, seq_len: int) -> Order:
    """The order of a fresh run; a small source may have no document for a short phase."""
    try:
        return reopen_order((), sources, data, seq_len=seq_len, steps=STEPS, **FIXED)
    except DataError as error:
        if "holds no units left for one of data.phases" not in str(error):
            raise
        reject()


@settings(max_examples=30, deadline=None)
@given(config=configs(STEPS), world=worlds, step=st.integers(0, STEPS))
def test_a_run_of_any_phases_reads_every_unit_once_an_epoch(
    sources: dict[str, DataSet], config: tuple[DataConfig, int], world: int, step: int
) -> None:
    data, seq_len = config
    order = _opened(sources, data, seq_len)
    eaten = eat(order, sources, STEPS)
    assert_nothing_repeats(eaten)
    assert_nothing_is_lost(eaten, sources)
    assert_shares(order, eaten)
    assert_counted(order, eaten)
    assert_loaded(order, sources, eaten, world)
    assert order.left_unread() == ()
    assert order.steps_known() is None
    # A resume that changes nothing is the same order, from any step.
    again = reopen_order(
        through_json(order), sources, data, seq_len=seq_len, steps=STEPS, step=step, **FIXED
    )
    assert again.segments == order.segments


@settings(max_examples=30, deadline=None)
@given(config=configs(STEPS), other=configs(STEPS), step=st.integers(1, STEPS - 1), world=worlds)
def test_a_change_at_a_resume_keeps_what_was_read_and_repeats_nothing(
    sources: dict[str, DataSet],
    config: tuple[DataConfig, int],
    other: tuple[DataConfig, int],
    step: int,
    world: int,
) -> None:
    before = _opened(sources, *config)
    after = reopen_order(
        through_json(before),
        sources,
        other[0],
        seq_len=other[1],
        steps=STEPS,
        step=step,
        **FIXED,
    )
    eaten = eat(after, sources, STEPS)
    assert eaten[:step] == eat(before, sources, step)
    assert_nothing_repeats(eaten)
    assert_shares(after, eaten)
    assert_counted(after, eaten)
    assert_loaded(after, sources, eaten, world)
    _assert_unread(after, eaten)


def _assert_unread(order: Order, eaten: list[list[Eaten]]) -> None:
    """What the order says was left behind, against what was not read of those epochs."""
    for unread in order.left_unread():
        read = {
            (sample.packing_spec, sample.unit)
            for row in eaten[: unread.step]
            for sample in row
            if (sample.source, sample.epoch) == (unread.source, unread.epoch)
        }
        sizes = {spec: sum(1 for c, _ in read if c == spec) for spec, _ in read}
        assert 0 < unread.units < unread.of
        assert unread.of - unread.units in sizes.values()
        # The epoch is over: nobody reads on in it under that cut.
        later = {
            sample.epoch
            for row in eaten[unread.step :]
            for sample in row
            if sample.source == unread.source and sizes.get(sample.packing_spec) is not None
        }
        assert unread.epoch not in later


def test_phases_that_cut_alike_share_documents_and_others_do_not(tmp_path: Path) -> None:
    sources = {"s0": write_data(tmp_path, [[7] * 80, [9] * 80], first_id=1)}
    data = DataConfig(
        sources={"s0": 1},
        packing="concat",
        phases=(
            PhaseConfig(at=4, seq_len=16),
            PhaseConfig(at=6, seq_len=8),  # back to the first cut: it goes on where it was
        ),
    )
    order = reopen_order((), sources, data, seq_len=8, steps=8, **FIXED)
    first, second, third = order.segments
    assert first.slices == third.slices
    assert first.slices["s0"] == (0, second.slices["s0"][0])
    assert second.slices["s0"][1] == PART_COUNT
    # Three quarters of the steps have the first cut, and so have three quarters of the documents.
    assert abs(first.slices["s0"][1] / PART_COUNT - 0.75) < 0.001
    eaten = eat(order, sources, 8)
    assert_nothing_repeats(eaten)
    assert {sample.epoch for row in eaten for sample in row} == {0}
    assert order.epochs(order.sample_of(8))["s0"] == pytest.approx(
        sum(len(s.tokens) for row in eaten for s in row) / (80 * 16), rel=0.1
    )


def test_parts_hold_every_document_once(tmp_path: Path) -> None:
    sources = {"s0": write_data(tmp_path, [[5] * 300, [6] * 300], first_id=1)}
    data = DataConfig(
        sources={"s0": 1}, packing="pad", phases=(PhaseConfig(at=0.5, packing="concat"),)
    )
    order = reopen_order((), sources, data, seq_len=8, steps=10, **FIXED)
    cuts = [segment.packing_spec("s0") for segment in order.segments]
    documents = [
        {
            token
            for unit in range(sources["s0"].size(spec).units)
            for token in sources["s0"].unit(unit, spec).inputs.ravel().tolist()
            if token
        }
        for spec in cuts
    ]
    assert not documents[0] & documents[1]
    assert documents[0] | documents[1] == set(range(1, 300 * 11 + 1))
    assert sum(sources["s0"].size(spec).documents for spec in cuts) == 600
    assert 240 < sources["s0"].size(cuts[0]).documents < 360


def test_a_longer_horizon_does_not_deal_documents_out_again(tmp_path: Path) -> None:
    sources = {"s0": write_data(tmp_path, [[7] * 80, [9] * 80], first_id=1)}
    data = DataConfig(sources={"s0": 1}, phases=(PhaseConfig(at=0.5, seq_len=16),))
    options = {"seq_len": 8, **FIXED}
    order = reopen_order((), sources, data, steps=10, **options)
    longer = reopen_order(order.segments, sources, data, steps=20, step=3, **options)
    assert [s.first_step for s in longer.segments] == [0, 10]
    assert [s.slices for s in longer.segments] == [s.slices for s in order.segments]
    assert longer.left_unread() == ()
    # A phase that comes up later was not dealt any: it starts the next epoch, and that is said.
    third = DataConfig(sources={"s0": 1}, phases=(*data.phases, PhaseConfig(at=0.8, packing="pad")))
    changed = reopen_order(order.segments, sources, third, steps=10, step=3, **options)
    assert [s.first_step for s in changed.segments] == [0, 5, 8]
    assert changed.segments[2].packing_spec("s0").part == ALL_PARTS
    assert {unread.step for unread in changed.left_unread()} == {8}
    assert changed.locate(changed.sample_of(8)).epoch == 1
    assert changed.left_unread(changed.sample_of(8) - 1) == ()


def test_phases_that_do_not_fit_the_run_are_refused(tmp_path: Path) -> None:
    sources = {"s0": write_data(tmp_path, [[7] * 40])}
    late = DataConfig(sources={"s0": 1}, phases=(PhaseConfig(at=40, seq_len=16),))
    with pytest.raises(ConfigError, match="at 40 would begin at step 40 of 10"):
        reopen_order((), sources, late, seq_len=8, steps=10, **FIXED)
    odd = DataConfig(sources={"s0": 1}, phases=(PhaseConfig(at=4, seq_len=7),))
    with pytest.raises(ConfigError, match="96 is not a multiple of the rows' seq_len 7"):
        reopen_order((), sources, odd, seq_len=8, steps=10, **FIXED)


def test_only_data_that_is_still_to_be_read_must_be_there(tmp_path: Path) -> None:
    sources = {n: write_data(tmp_path / n, [[7] * 40], name=n) for n in ("s0", "s1")}
    data = DataConfig(
        sources={"s0": 1}, packing="pad", phases=(PhaseConfig(at=5, sources={"s1": 1}),)
    )
    order = reopen_order((), sources, data, seq_len=8, steps=10, **FIXED)
    only = {"s1": sources["s1"]}
    with pytest.raises(DataError, match="reads s0, which is not opened"):
        BatchReader(only, order, micro_tokens=16)
    assert BatchReader(only, order, micro_tokens=16, first_step=5).step(6)


def test_a_segment_comes_back_from_json_as_it_was() -> None:
    least = {
        "first_sample": 0,
        "digests": {"a": "d"},
        "weights": {"a": 1.0},
        "units": {"a": 7},
        "seq_len": 32,
        "packing": "bestfit",
        "rows_per_step": 4,
    }
    segment = Segment.from_json(least)
    assert (segment.first_step, segment.rows_per_step) == (0, 4)
    assert (segment.shards, segment.slices, segment.buckets) == ({}, {}, ())
    assert Order(1, [segment]).sample_of(5) == 20
    assert Segment.from_json(json.loads(json.dumps(segment.to_json()))) == segment
    with pytest.raises(DataError, match="no units per step"):
        Order(1, [Segment.from_json({**least, "rows_per_step": 0})])
