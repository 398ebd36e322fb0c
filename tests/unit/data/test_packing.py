"""Packing: pure, lossless, tight, and cached without being believed."""

import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from foundling.config.data import packing_spec_of
from foundling.data import packing
from foundling.data.dataset import DataSet
from foundling.data.packing import PiecePlan, pack

LENGTHS = st.lists(st.integers(2, 70), min_size=1, max_size=60)


def offsets_of(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def bestfit(lengths: Sequence[int], seq_len: int) -> PiecePlan:
    plan = pack(offsets_of(lengths), packing_spec_of(seq_len, "bestfit"))
    assert isinstance(plan, PiecePlan)
    return plan


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 40))
def test_bestfit_keeps_every_token_once(lengths: list[int], seq_len: int) -> None:
    plan = bestfit(lengths, seq_len)
    starts = np.cumsum(lengths) - lengths
    covered = np.zeros(sum(lengths), np.int64)
    for start, length, goes_on in zip(
        plan.starts.tolist(), plan.lengths.tolist(), plan.continues.tolist(), strict=True
    ):
        covered[start : start + length] += 1
        document = int(np.searchsorted(starts, start, side="right")) - 1
        end = starts[document] + lengths[document]
        # A piece starts at its document, or a whole number of rows into one that is too long.
        assert (start - starts[document]) % seq_len == 0
        assert (start + length < end) == bool(goes_on)
        assert length == seq_len or start + length == end
    assert (covered == 1).all()
    used = np.add.reduceat(plan.lengths, plan.first[:-1])
    assert used.min() >= 1
    assert used.max() <= seq_len
    assert plan.size.positions == plan.rows * seq_len
    assert (plan.size.tokens, plan.size.documents) == (sum(lengths), len(lengths))
    assert plan.cuts == sum((length - 1) // seq_len for length in lengths)
    # Best fit decreasing never needs more than 11/9 of the best, plus a row.
    assert plan.rows <= -(-sum(lengths) // seq_len) * 11 / 9 + 1 or max(lengths) > seq_len / 2


def test_a_row_longer_than_all_documents_takes_no_more_memory() -> None:
    tracemalloc.start()
    try:
        plan = bestfit([40, 2, 40], 3_000_000)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert (plan.rows, plan.tokens, plan.positions) == (1, 82, 3_000_000)


def _one_by_one(lengths: list[int], seq_len: int) -> int:
    """Rows that best fit decreasing opens when it places piece by piece."""
    pieces = sorted(
        (min(seq_len, n - at) for n in lengths for at in range(0, n, seq_len)), reverse=True
    )
    free: list[int] = []
    for piece in pieces:
        fitting = [room for room in free if room >= piece]
        best = min(fitting) if fitting else seq_len
        if fitting:
            free.remove(best)
        free.append(best - piece)
    return len(free)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(4, 40))
def test_bulk_placing_is_as_tight_as_one_by_one(lengths: list[int], seq_len: int) -> None:
    assert bestfit(lengths, seq_len).rows <= _one_by_one(lengths, seq_len) + 1


def test_bestfit_wastes_little_on_real_lengths() -> None:
    lengths = np.random.default_rng(0).lognormal(4.2, 0.8, 5000).astype(np.int64) + 2
    size = bestfit(lengths.tolist(), 256).size
    assert size.tokens > 0.995 * size.positions


@settings(max_examples=50, deadline=None)
@given(LENGTHS, st.integers(1, 40))
def test_concat_needs_as_many_rows_as_the_tokens(lengths: list[int], seq_len: int) -> None:
    plan = pack(offsets_of(lengths), packing_spec_of(seq_len, "concat"))
    assert (plan.units - 1) * seq_len < sum(lengths) <= plan.units * seq_len


def _plans(data: DataSet) -> list[Path]:
    return sorted(data.folder.rglob("*.plan"))


def test_a_plan_is_computed_once_and_read_back(
    make_data: Callable[..., DataSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_data([[5, 9, 70, 3], [8, 8, 8]])
    units = data.units(16, "bestfit")
    assert len(_plans(data)) == 2
    rows = [data.row(unit, 16, "bestfit").inputs for unit in range(units)]

    def never(*_: object) -> None:
        raise AssertionError("packed again")

    monkeypatch.setattr(packing, "pack_pieces", never)
    again = DataSet(data.folder)
    for unit, inputs in enumerate(rows):
        assert (again.row(unit, 16, "bestfit").inputs == inputs).all()


def test_a_damaged_plan_is_computed_again(make_data: Callable[..., DataSet]) -> None:
    data = make_data([[5, 9, 70, 3, 12, 7]])
    data.units(16, "bestfit")
    (file,) = _plans(data)
    whole = file.read_bytes()
    rng = np.random.default_rng(0)
    damages = [whole[: len(whole) // 2], b"", *(bytearray(whole) for _ in range(40))]
    for damaged in damages:
        if isinstance(damaged, bytearray):
            damaged[int(rng.integers(len(damaged)))] ^= 1 << int(rng.integers(8))
        file.write_bytes(damaged)
        again = DataSet(data.folder)
        inputs = [again.row(u, 16, "bestfit").inputs for u in range(again.units(16, "bestfit"))]
        documents = np.concatenate(inputs).ravel()
        assert sorted(documents[documents > 0].tolist()) == list(range(1, 106))


def test_a_folder_that_cannot_be_written_to_is_no_obstacle(
    make_data: Callable[..., DataSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_data([[5, 9, 70, 3]])

    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(packing, "write_arrow", refuse)
    assert data.units(16, "bestfit") == bestfit([5, 9, 70, 3], 16).rows
    assert _plans(data) == []
