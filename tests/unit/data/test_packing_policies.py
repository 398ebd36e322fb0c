"""pad, bucket and parts of a source: nothing lost, shapes as promised, sizes noted once."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unique_data import write_data

from foundling.config import packing_spec
from foundling.config.data import DataConfig, packing_spec_of
from foundling.config.errors import DataError
from foundling.config.packing_spec import (
    PART_COUNT,
    PackedSize,
    PackingSpec,
    bucket_edges,
    packed_size,
    read_size_cache,
    shard_key,
    write_size_cache,
)
from foundling.data import packing as packing_module
from foundling.data.dataset import DataSet
from foundling.data.packing import BucketPlan, PiecePlan, chosen, pack

LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=60)
EDGES = (4, 9, 16, 30)


@st.composite
def cuts(draw: st.DrawFn) -> PackingSpec:
    packing = draw(st.sampled_from(["concat", "bestfit", "bucket", "pad"]))
    low = draw(st.integers(0, PART_COUNT - 1))
    return PackingSpec(
        seq_len=30,
        packing=packing,  # type: ignore[arg-type]
        edges=EDGES if packing == "bucket" else (),
        unit_tokens=draw(st.integers(30, 90)) if packing == "bucket" else 0,
        part=(low, draw(st.integers(low + 1, PART_COUNT))),
    )


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, spec=cuts())
def test_pieces_hold_every_token_of_the_part_once(lengths: list[int], spec: PackingSpec) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mine = chosen("a" * 64, len(lengths), spec)
    plan = pack(offsets, spec, mine)
    wanted = np.zeros(int(offsets[-1]), np.int64)
    for document in range(len(lengths)):
        if mine is None or mine[document]:
            wanted[offsets[document] : offsets[document + 1]] = 1
    if spec.packing == "concat" and mine is None:
        assert plan.units == -(-sum(lengths) // spec.seq_len)
        return
    pieces = plan.pieces if isinstance(plan, BucketPlan) else plan
    assert isinstance(pieces, PiecePlan)
    found = np.zeros_like(wanted)
    ends = set(offsets.tolist())
    for start, length, goes_on in zip(
        pieces.starts.tolist(), pieces.lengths.tolist(), pieces.continues.tolist(), strict=True
    ):
        found[start : start + length] += 1
        assert (start + length not in ends) == bool(goes_on)
    assert (found == wanted).all()
    assert not isinstance(plan, BucketPlan) or _fits(plan, spec)
    size = plan.size  # type: ignore[union-attr]
    assert size.tokens == wanted.sum()
    assert size.documents == (len(lengths) if mine is None else np.count_nonzero(mine))
    assert size.cuts == pieces.continues.sum()
    if spec.packing == "pad":
        assert (np.diff(pieces.first) == 1).all()


def _fits(plan: BucketPlan, spec: PackingSpec) -> bool:
    """Rows of a unit are of one bucket, and no more of them than its token budget holds."""
    for unit in range(plan.units):
        rows, width = plan.shape(unit)
        below = max((edge for edge in EDGES if edge < width), default=0)
        lengths = plan.pieces.lengths[plan.first[unit] : plan.first[unit + 1]]
        assert rows * width <= spec.unit_tokens < (rows + 1) * width
        assert 0 < len(lengths) <= rows
        assert below < lengths.min() <= lengths.max() <= width
    return True


def test_parts_are_dealt_evenly_and_for_ever() -> None:
    half = PackingSpec(seq_len=8, packing="pad", part=(0, PART_COUNT // 2))
    rest = PackingSpec(seq_len=8, packing="pad", part=(PART_COUNT // 2, PART_COUNT))
    first, second = (chosen("ab" * 32, 20_000, spec) for spec in (half, rest))
    assert first is not None
    assert second is not None
    assert (first ^ second).all()
    assert abs(np.count_nonzero(first) - 10_000) < 400
    # Neighbours are dealt apart, and another shard is dealt otherwise.
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.03
    other = chosen("cd" * 32, 20_000, half)
    assert other is not None
    assert 9_000 < np.count_nonzero(first == other) < 11_000
    # Pinned: a run that goes on must find the documents where it left them.
    assert np.flatnonzero(first)[:8].tolist() == [0, 2, 5, 6, 9, 10, 12, 13]


def test_buckets_are_those_of_the_account_that_used_them() -> None:
    """FACTS, account 002: its edges, and rows within one of its own for about 14k tokens."""
    data = DataConfig(packing="bucket", bucket_tokens=14_336)
    spec = packing_spec_of(8192, "bucket", data)
    assert spec.edges == (256, 512, 768, 1024, 1536, 2048, 8192)
    rows = [spec.rows_in(edge) for edge in spec.edges]
    assert rows == [56, 28, 18, 14, 9, 7, 1]
    assert bucket_edges(data.buckets, 1024) == (256, 512, 768, 1024)
    assert bucket_edges(data.buckets, 1200) == (256, 512, 768, 1024, 1200)
    assert spec.units_per_step(4 * 14_336) == 4


def test_a_bucket_unit_is_a_batch_of_its_own_shape(tmp_path: Path) -> None:
    data = write_data(tmp_path, [[3, 4, 9, 16, 30, 2, 40]], first_id=1, mask_seed=2)
    spec = PackingSpec(seq_len=30, packing="bucket", edges=EDGES, unit_tokens=36)
    shapes = [data.packed(spec).shape(unit) for unit in range(data.size(spec).units)]
    assert shapes == [(9, 4), (4, 9), (2, 16), (1, 30), (1, 30)]
    batch = data.unit(0, spec)
    assert batch.inputs.shape == (9, 4)
    assert batch.bounds.filled.tolist() == [3, 4, 2, 0, 0, 0, 0, 0, 0]
    assert batch.inputs[0].tolist() == [1, 2, 3, 0]
    # 40 tokens are one piece of 30 and one of 10, which is a row of 16.
    assert data.unit(2, spec).bounds.filled.tolist() == [16, 10]
    assert data.unit(4, spec).targets[0, -1] in (-100, 95)  # the cut document goes on
    assert data.size(spec) == PackedSize(5, 36 + 36 + 32 + 30 + 30, 104, 7, 1)


def test_sizes_are_noted_once_and_a_damaged_note_is_not_believed(
    make_data: Callable[..., DataSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_data([[5, 9, 70, 3], [8, 8, 8]])
    spec = packing_spec_of(16, "bestfit")
    size = data.size(spec)
    assert packed_size(data.folder, data.manifest, spec) == (size, True)
    assert (size.tokens, size.cuts, size.documents) == (111, 4, 7)
    note = data.folder / "rows-bestfit1-16.json"
    whole = note.read_bytes()

    def never(*_: object) -> None:
        raise AssertionError("packed again")

    with monkeypatch.context() as patch:
        patch.setattr(packing_module, "plan_for", never)
        patch.setattr("foundling.data.dataset.plan_for", never)
        assert DataSet(data.folder).size(spec) == size
    rng = np.random.default_rng(0)
    for _ in range(40):
        damaged = bytearray(whole)
        damaged[int(rng.integers(len(damaged)))] ^= 1 << int(rng.integers(8))
        note.write_bytes(damaged)
        assert DataSet(data.folder).size(spec) == size
    note.write_bytes(whole[:30])
    assert packed_size(data.folder, data.manifest, spec)[1] is False
    assert DataSet(data.folder).size(spec) == size
    assert note.read_bytes() == whole


def test_a_note_grows_with_the_data_set(make_data: Callable[..., DataSet]) -> None:
    small, large = make_data([[5, 9, 70, 3]]), make_data([[5, 9, 70, 3], [8, 8, 8]])
    spec = packing_spec_of(16, "pad")
    small.size(spec)
    note = read_size_cache(small.folder, spec)
    assert shard_key(large.shards[0]) in note
    write_size_cache(large.folder, spec, note)
    assert large.size(spec).units == 8 + 3
    assert len(read_size_cache(large.folder, spec)) == 2
    assert large.size(spec, (1, 2)) == PackedSize(3, 48, 24, 3, 0)


def test_a_note_that_lies_is_found_out(make_data: Callable[..., DataSet]) -> None:
    data = make_data([[5, 9, 70, 3]])
    spec = packing_spec_of(16, "bestfit")
    true = data.size(spec)
    lie = PackedSize(true.units + 1, true.positions + 16, true.tokens, true.documents, true.cuts)
    write_size_cache(data.folder, spec, {shard_key(data.shards[0]): lie})
    with pytest.raises(DataError, match=r"rows-bestfit1-16\.json .* does not fit its shards"):
        DataSet(data.folder).unit(0, spec)


def test_guesses_for_a_plan_are_marked(make_data: Callable[..., DataSet]) -> None:
    data = make_data([[5, 9, 70, 3], [8, 8, 8]])
    guess, exact = packed_size(data.folder, data.manifest, packing_spec_of(16, "pad"))
    assert not exact
    assert guess.units == 6 + 3  # full rows, or one a document where that is more
    half = PackingSpec(seq_len=16, packing="concat", part=(0, PART_COUNT // 2))
    guess, exact = packed_size(data.folder, data.manifest, half)
    assert (guess.tokens, exact) == (44 + 12, False)
    whole, exact = packed_size(data.folder, data.manifest, packing_spec_of(16, "concat"))
    assert (whole.units, exact) == (data.units(16, "concat"), True)
    assert packing_spec.total_size([]) == PackedSize()
