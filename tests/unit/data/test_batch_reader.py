"""The loader against brute force: every token followed, every count recounted."""

import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from unique_data import write_data

from foundling.config.data import DataConfig
from foundling.config.errors import DataError
from foundling.data.batch import IGNORE, Batch, Bounds, Counts
from foundling.data.batch_reader import BatchReader
from foundling.data.dataset import DataSet
from foundling.data.order import Order, reopen_order

WORLDS = (1, 2, 3, 4, 8)
SHARDS = st.lists(st.lists(st.integers(2, 60), min_size=1, max_size=12), min_size=1, max_size=3)


def order_of(
    sources: Mapping[str, DataSet], config: DataConfig, seq_len: int, rows: int, seed: int
) -> Order:
    """The order of a run whose steps have so many rows."""
    return reopen_order(
        (),
        sources,
        config,
        seed=seed,
        seq_len=seq_len,
        steps=10,
        global_batch_tokens=rows * seq_len,
    )


def expected_targets(data: DataSet, inputs: NDArray[np.int64]) -> NDArray[np.int64]:
    """What must be predicted from each token, worked out from the shards alone."""
    follows: dict[int, int] = {}
    for number in range(len(data.shards)):
        shard = data.shard(number)
        starts = set(shard.offsets.tolist())
        for place, token in enumerate(shard.tokens.tolist()):
            inside = place + 1 not in starts
            if inside and (shard.mask is None or shard.mask[place + 1]):
                follows[token] = token + 1
    return np.array([follows.get(token, IGNORE) for token in inputs.ravel().tolist()])


def real_rows(batches: list[Batch]) -> list[tuple[bytes, bytes, bytes]]:
    """Rows that hold something, as bytes that can be compared."""
    return [
        (batch.inputs[row].tobytes(), batch.targets[row].tobytes(), batch.documents[row].tobytes())
        for batch in batches
        for row in range(len(batch.inputs))
        if (batch.documents[row] >= 0).any()
    ]


@settings(max_examples=30, deadline=None)
@given(
    shards=st.lists(SHARDS, min_size=1, max_size=3),
    weights=st.lists(st.floats(0.1, 1.0), min_size=3, max_size=3),
    seed=st.integers(0, 2**40),
    seq_len=st.integers(2, 40),
    packing=st.sampled_from(["concat", "bestfit"]),
    global_batch=st.integers(1, 13),
    micro_batch=st.integers(1, 5),
    chat=st.booleans(),
)
def test_any_prefix_is_the_same_at_every_world_size(
    shards: list[list[list[int]]],
    weights: list[float],
    seed: int,
    seq_len: int,
    packing: str,
    global_batch: int,
    micro_batch: int,
    chat: bool,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sources = {}
        for number, lengths in enumerate(shards):
            sources[f"s{number}"] = write_data(
                Path(folder) / str(number),
                lengths,
                name=str(number),
                first_id=10_000 * number,
                mask_seed=7 if chat else None,
            )
        shares = dict(zip(sources, weights, strict=False))
        config = DataConfig(sources=shares, packing=packing)  # type: ignore[arg-type]
        order = order_of(sources, config, seq_len, global_batch, seed)
        options = {"micro_tokens": micro_batch * seq_len}
        whole = BatchReader(sources, order, **options)
        reference = [real_rows(whole.step(step)) for step in range(4)]
        for step in range(4):
            assert len(reference[step]) == global_batch
            at = order.locate_range(step * global_batch, global_batch)
            for place, row in enumerate(reference[step]):
                data = sources[at.names[at.sources[place]]]
                one = data.row(int(at.units[place]), seq_len, packing)  # type: ignore[arg-type]
                assert row == real_rows([one])[0]
        for world in WORLDS[1:]:
            loaders = [
                BatchReader(sources, order, rank=r, world=world, **options) for r in range(world)
            ]
            for step in range(4):
                parts = [loader.step(step) for loader in loaders]
                shapes = {tuple(batch.inputs.shape for batch in part) for part in parts}
                assert len(shapes) == 1
                assert all(len(b.inputs) <= micro_batch for part in parts for b in part)
                # Rank after rank gives the global batch again: so ranks are disjoint, too.
                assert [row for part in parts for row in real_rows(part)] == reference[step]


@settings(max_examples=60, deadline=None)
@given(
    shards=SHARDS,
    seed=st.integers(0, 2**40),
    seq_len=st.integers(1, 40),
    packing=st.sampled_from(["concat", "bestfit"]),
    mask_seed=st.none() | st.integers(0, 9),
)
def test_an_epoch_reads_every_token_once_and_counts_exactly(
    shards: list[list[int]], seed: int, seq_len: int, packing: str, mask_seed: int | None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # Ids from 1 on: 0 is what padding holds.
        data = write_data(Path(folder), shards, first_id=1, mask_seed=mask_seed)
        units = data.units(seq_len, packing)  # type: ignore[arg-type]
        config = DataConfig(sources={"a": 1.0}, packing=packing)  # type: ignore[arg-type]
        order = order_of({"a": data}, config, seq_len, units, seed)
        loader = BatchReader({"a": data}, order, micro_tokens=3 * seq_len)
        batches = loader.step(0)
        inputs = np.concatenate([batch.inputs for batch in batches])
        targets = np.concatenate([batch.targets for batch in batches])
        documents = np.concatenate([batch.documents for batch in batches])
        total = sum(map(sum, shards))
        real = documents >= 0
        assert sorted(inputs[real].tolist()) == list(range(1, total + 1))
        assert (inputs[~real] == 0).all()
        assert (targets.ravel() == expected_targets(data, inputs)).all()
        counts = sum((batch.counts for batch in batches), Counts())
        assert counts == Counts(
            positions=inputs.size, tokens=total, targets=sum(s.targets for s in data.shards)
        )
        by_source = sum((batch.by_source.get("a", Counts()) for batch in batches), Counts())
        assert by_source == Counts(units * seq_len, total, counts.targets)
        assert sum(batch.units.get("a", 0) for batch in batches) == units
        _check_documents(data, inputs, documents, packing)
        for batch in batches:
            again = Bounds.of(batch.documents)
            assert (again.starts == batch.bounds.starts).all()
            assert (again.filled == batch.bounds.filled).all()


def _check_documents(
    data: DataSet, inputs: NDArray[np.int64], documents: NDArray[np.int32], packing: str
) -> None:
    """Document numbers change exactly where the document does; bestfit rows start at one."""
    document_of, starts_at = {}, {}
    for number in range(len(data.shards)):
        shard = data.shard(number)
        for index in range(len(shard)):
            part = shard.tokens[shard.offsets[index] : shard.offsets[index + 1]].tolist()
            document_of.update(dict.fromkeys(part, (number, index)))
            starts_at.update({token: place for place, token in enumerate(part)})
    for row, numbers in zip(inputs.tolist(), documents.tolist(), strict=True):
        size = sum(number >= 0 for number in numbers)
        assert numbers[size:] == [-1] * (len(row) - size)
        expected, place = [], -1
        for position in range(size):
            new = position == 0 or document_of[row[position]] != document_of[row[position - 1]]
            place += new
            expected.append(place)
            if new and packing == "bestfit":
                assert starts_at[row[position]] % len(row) == 0
        assert numbers[:size] == expected


def _small(
    make_data: Callable[..., DataSet], global_batch: int, **options: int
) -> tuple[BatchReader, DataSet]:
    data = make_data([[5, 9, 30, 3, 12, 7]])
    order = order_of({"a": data}, DataConfig(sources={"a": 1.0}), 8, global_batch, 1)
    return BatchReader({"a": data}, order, micro_tokens=16, **options), data


def test_ranks_without_rows_still_take_part(make_data: Callable[..., DataSet]) -> None:
    loader, _ = _small(make_data, global_batch=2, rank=2, world=3)
    (batch,) = loader.step(0)
    assert batch.inputs.shape == (1, 8)
    assert (batch.targets == IGNORE).all()
    assert (batch.documents == -1).all()
    assert batch.counts == Counts(positions=8)
    assert batch.by_source == {}


def test_a_step_is_a_pure_function_and_prefetch_gives_the_same(
    make_data: Callable[..., DataSet],
) -> None:
    loader, _ = _small(make_data, global_batch=3)
    later = [real_rows(loader.step(step)) for step in (7, 3, 7)]
    assert later[0] == later[2]
    ahead = list(loader.prefetch(2, 9, depth=3))
    assert [step for step, _ in ahead] == list(range(2, 9))
    assert real_rows(ahead[1][1]) == later[1]
    assert real_rows(ahead[5][1]) == later[0]


def test_leaving_prefetch_ends_its_thread(make_data: Callable[..., DataSet]) -> None:
    loader, _ = _small(make_data, global_batch=3)
    stream = loader.prefetch(0, 10**9, depth=2)
    assert next(stream)[0] == 0
    assert any(thread.name == "prefetch" for thread in threading.enumerate())
    stream.close()  # type: ignore[attr-defined]
    assert not any(thread.name == "prefetch" for thread in threading.enumerate())


def test_what_goes_wrong_in_the_thread_is_raised_in_the_loop(
    make_data: Callable[..., DataSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, _ = _small(make_data, global_batch=3)
    whole = loader.step

    def breaks(step: int) -> list[Batch]:
        if step == 2:
            raise DataError("the disk is gone.")
        return whole(step)

    monkeypatch.setattr(loader, "step", breaks)
    stream = loader.prefetch(0, 5)
    assert [next(stream)[0], next(stream)[0]] == [0, 1]
    with pytest.raises(DataError, match="disk is gone"):
        next(stream)


def test_data_that_the_order_was_not_made_for_is_refused(
    make_data: Callable[..., DataSet],
) -> None:
    loader, data = _small(make_data, global_batch=3)
    other = make_data([[5, 9, 31, 3, 12, 7]])
    with pytest.raises(DataError, match="not the data set the order was made for"):
        BatchReader({"a": other}, loader.order, micro_tokens=16)
    with pytest.raises(DataError, match="reads a, which is not opened"):
        BatchReader({"b": data}, loader.order, micro_tokens=16)
    with pytest.raises(ValueError, match="rank=3"):
        BatchReader({"a": data}, loader.order, micro_tokens=16, rank=3, world=3)


def test_a_resumed_order_reads_on_from_json(make_data: Callable[..., DataSet]) -> None:
    loader, data = _small(make_data, global_batch=3)
    saved = [segment.to_json() for segment in loader.order.segments]
    order = Order(1, [type(loader.order.segments[0]).from_json(entry) for entry in saved])
    again = BatchReader({"a": data}, order, micro_tokens=16)
    assert real_rows(again.step(5)) == real_rows(loader.step(5))
