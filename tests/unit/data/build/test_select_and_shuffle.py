"""The parts of a build by themselves, each against the plain way to do it."""

from pathlib import Path

import numpy as np
import pytest
from build_samples import Numbers, learn, make
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from unique_data import make_shard

from foundling.data.build.decontaminate import BLOCK, Overlap, evaluation_texts, normalised
from foundling.data.build.encode import EncodeJob
from foundling.data.build.scheduler import Scheduler
from foundling.data.build.select import Duplicates
from foundling.data.build.shard_writer import cut, wave_end
from foundling.data.build.shuffle import chosen, in_order
from foundling.data.permutation import permute, round_keys, unpermute
from foundling.data.shard import Shard, write_shard


@given(st.integers(1, 3000), st.integers(0, 9))
@settings(max_examples=50, deadline=None)
def test_the_shuffle_can_be_asked_both_ways(size: int, seed: int) -> None:
    keys = round_keys("test", seed)
    index = np.arange(size)
    place = permute(index, size, keys)
    assert sorted(place.tolist()) == index.tolist()
    assert (unpermute(place, size, keys) == index).all()


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_further_copies_are_found_whatever_fits_into_memory(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    contents = data.draw(st.lists(st.integers(0, 30), max_size=120))
    drawn = data.draw(st.booleans())
    lots = data.draw(st.integers(1, 5))
    found = Duplicates(
        tmp_path_factory.mktemp("hashes"), in_memory=data.draw(st.sampled_from([1, 7, 999]))
    )
    seen: set[int] = set()
    wanted: list[bool] = []
    for lot in np.array_split(np.array(contents, np.uint64), lots):
        rng = np.random.default_rng(5)
        hashes = rng.integers(0, 2**63, (31, 2)).astype(np.uint64)[lot.astype(int)]
        draws = drawn and len(wanted) % 2 == 0
        found.add(hashes, draws)
        for content in lot.tolist():
            wanted.append(content in seen and not draws)
            if not draws:
                seen.add(content)
        found.settle()  # what was decided stays decided
        assert found.further(0, len(wanted)).tolist() == wanted
    if len(wanted) > 8:
        assert found.further(3, 5).tolist() == wanted[3:8]


def lengths_and_tokens(shards: list[Shard]) -> list[tuple[list[int], ...]]:
    return [
        tuple(
            [] if column is None else column.tolist()
            for column in (
                shard.tokens[start:stop],
                None if shard.mask is None else shard.mask[start:stop],
                shard.text_bytes[n : n + 1],
                shard.kind_codes[n : n + 1],
            )
        )
        for shard in shards
        for n, (start, stop) in enumerate(zip(shard.offsets[:-1], shard.offsets[1:], strict=True))
    ]


def take(shard: Shard, order: NDArray[np.int64]) -> Shard:
    """The chosen documents of a shard in the given order, one by one."""
    spans = [slice(shard.offsets[n], shard.offsets[n + 1]) for n in order]
    lengths = np.diff(shard.offsets)[order]
    return Shard(
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens=np.concatenate([shard.tokens[span] for span in spans]),
        mask=None if shard.mask is None else np.concatenate([shard.mask[s] for s in spans]),
        text_bytes=shard.text_bytes[order],
        kind_codes=shard.kind_codes[order],
        kind_names=shard.kind_names,
        floor_bits=shard.floor_bits[order],
    )


def test_a_write_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError("gone")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="gone"):
        write_shard(tmp_path / "x.arrow", make_shard([300, 400], 0, None))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mask", [None, 3])
@pytest.mark.parametrize(("longest", "in_memory"), [(20, 10**9), (20, 300), (900, 700), (9, 40)])
def test_documents_come_in_order_with_any_memory(
    tmp_path: Path, mask: int | None, longest: int, in_memory: int
) -> None:
    rng = np.random.default_rng(1)
    shard = make_shard(rng.integers(1, longest, 400).tolist(), 0, mask)
    place = rng.permutation(400)
    lots = [
        chosen(shard, np.arange(first, min(first + 90, 400)), place[first : first + 90])
        for first in range(0, 400, 90)
    ]
    blocks = list(in_order(iter(lots), 0, 400, len(shard.tokens), tmp_path / "box", in_memory))
    order = np.empty(400, np.int64)
    order[place] = np.arange(400)
    assert lengths_and_tokens(blocks) == lengths_and_tokens([take(shard, order)])
    assert all(len(block.tokens) <= max(in_memory, longest) for block in blocks)
    assert (len(blocks) > 3) == (in_memory < 1000)
    assert not list(tmp_path.iterdir()), "boxes are left"


def plain_cut(lengths: NDArray[np.int64], shard_tokens: int) -> list[int]:
    """Documents of each shard, as the build has cut them since its first version."""
    total = np.cumsum(lengths)
    counts, start = [], 0
    while start < len(lengths):
        done = int(total[start - 1]) if start else 0
        stop = max(start + 1, int(total.searchsorted(done + shard_tokens, side="right")))
        counts.append(stop - start)
        start = stop
    return counts


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=60),
    st.integers(1, 100),
    st.integers(1, 7),
    st.sampled_from([None, 2]),
)
@settings(max_examples=100, deadline=None)
def test_shards_are_cut_where_they_always_were(
    lengths: list[int], shard_tokens: int, blocks: int, mask: int | None
) -> None:
    whole = make_shard(lengths, 0, mask)
    runs = np.array_split(np.arange(len(lengths)), blocks)
    ordered = (take(whole, run) for run in runs if len(run))
    shards = list(cut(ordered, shard_tokens, ("a", "b")))
    assert all(shard.kind_names == ("a", "b") for shard in shards)
    assert [len(shard) for shard in shards] == plain_cut(np.array(lengths), shard_tokens)
    assert lengths_and_tokens(shards) == lengths_and_tokens([whole])


def test_waves_grow_to_sixteen_shards() -> None:
    ends = [wave_end(wave, 100) for wave in range(9)]
    assert ends == [100, 200, 400, 800, 1600, 3200, 4800, 6400, 8000]


def test_a_board_waits_at_the_first_gap(tmp_path: Path) -> None:
    job = EncodeJob(
        tokenizer="", chat=False, val_share=0.1, wide=False, part_rows=30, part_chars=10**6
    )
    make(Numbers(), learn(), tmp_path / "d")  # only to see that a finished build leaves no parts
    assert not (tmp_path / "d" / ".build").exists()
    scheduler = Scheduler([Numbers(), Numbers(first=900, name="b")], job, tmp_path / "parts")
    first, second = scheduler.open_task(), scheduler.open_task()
    assert first is not None
    assert second is not None
    assert (first.piece.name, second.piece.name) == ("0..99", "900..999")
    assert scheduler.wanted() is first
    assert not scheduler.exhausted
    first.in_all = 0
    assert scheduler.wanted().piece.name == "100..199"  # type: ignore[union-attr]


EVALUATION = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."
)


@pytest.mark.parametrize(
    ("text", "touches"),
    [
        (EVALUATION, True),
        ("Before. " + EVALUATION.upper().replace(" ", "\n") + " after", True),
        (" ".join(EVALUATION.split()[:13]), True),
        (" ".join(EVALUATION.split()[:12]), False),
        (EVALUATION.replace("April", "June").replace("half", "twice"), False),
        (EVALUATION.replace(",", " --").replace(".", "!!"), True),
        ("word " * 40, False),
        ("", False),
        ("x " * (BLOCK // 2 - 6) + EVALUATION + " y" * BLOCK, True),
        ("x " * (BLOCK // 2 - 6) + EVALUATION.replace("she", "he") + " y" * BLOCK, False),
    ],
)
def test_thirteen_words_in_a_row_are_an_overlap(text: str, touches: bool, tmp_path: Path) -> None:
    overlap = Overlap.of([EVALUATION, "too short to count"])
    assert len(overlap.hashes) == len(EVALUATION.split()) - 12
    overlap.save(tmp_path / "overlap.npy")
    again = Overlap.load(tmp_path / "overlap.npy")
    assert again.digest == overlap.digest
    assert overlap.touches(text) is again.touches(text) is touches


@given(st.lists(st.sampled_from(["a", "b", "ß", "Ω", "i̇", "3", "--", "\n"]), max_size=60))
@settings(max_examples=60, deadline=None)
def test_overlaps_are_those_of_brute_force(words: list[str]) -> None:
    known = "a b a a b ß Ω a b a b b a 3 3 a b a b b b a a a b"
    text = " ".join(words)

    def runs(text: str) -> set[tuple[str, ...]]:
        parts = normalised(text).decode().split()
        return {tuple(parts[n : n + 13]) for n in range(len(parts) - 12)}

    assert Overlap.of([known]).touches(text) is bool(runs(known) & runs(text))


def test_evaluation_sets_of_any_columns_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "one", "choices": ["two", {"x": "three"}], "n": 4}\n')
    (tmp_path / "b.csv").write_text("question,answer\nfour,five\n")
    assert list(evaluation_texts([str(tmp_path)])) == ["one two three", "four five"]
