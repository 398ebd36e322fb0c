"""Rows are cut into parts, judged and split by nothing but themselves."""

from typing import Literal

import pytest
from build_samples import learn
from hypothesis import given, settings
from hypothesis import strategies as st

from foundling.data.build.encode import EncodeJob, PieceEncoder, chunks, encode_rows
from foundling.data.readers.source import InMemorySource, Row, is_held_out
from foundling.tokenizer.tokenizer import Tokenizer

HELD_OUT = [305, 346, 700, 1212, 1530, 1872, 1882]
"""By the hash that the first version had."""
TEXTS = st.lists(
    st.sampled_from(["a", "bb ", "c" * 7, "", " \n", "d\x00e", "\ud800", "ü" * 5]), max_size=60
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return learn()


def rows_of(texts: list[str]) -> list[Row]:
    return [Row(text=t, source="source", where=f"file:{n}") for n, t in enumerate(texts)]


def job(val_share: float = 0.1, rows: int = 9, chars: int = 20) -> EncodeJob:
    return EncodeJob(
        tokenizer="", chat=False, val_share=val_share, wide=False, part_rows=rows, part_chars=chars
    )


@given(TEXTS, st.integers(1, 9), st.integers(1, 20))
def test_where_a_part_ends_depends_on_the_rows_alone(
    texts: list[str], most_rows: int, most_chars: int
) -> None:
    kind: Literal["text"] = "text"
    piece = InMemorySource("source", kind, {}, rows_of(texts))
    found = [run for run, _ in chunks(piece, job(rows=most_rows, chars=most_chars))]
    assert [row for run in found for row in run] == rows_of(texts)
    assert all(found)
    for run in found[:-1]:
        held = [row.text or "" for row in run]
        assert len(held) == most_rows or sum(map(len, held)) >= most_chars
        assert len(held) <= most_rows
        assert sum(map(len, held[:-1])) < most_chars


@given(TEXTS, st.floats(0, 1))
@settings(deadline=None)
def test_rows_are_judged_one_by_one(tokenizer: Tokenizer, texts: list[str], share: float) -> None:
    rows = rows_of(texts)
    part = encode_rows(rows, PieceEncoder(job(val_share=share), tokenizer, None))
    assert part.rows == len(rows)
    good = [n for n, t in enumerate(texts) if t.strip() and not {"\x00", "\ud800"} & set(t)]
    assert part.row.tolist() == good
    bad = sorted(set(range(len(rows))) - set(good))
    assert [note["row"] for note in part.quarantine] == bad
    assert [note["where"] for note in part.quarantine] == [f"file:{n}" for n in bad]
    documents = part.documents
    assert [
        tokenizer.decode(documents.tokens[a + 1 : b - 1].tolist())
        for a, b in zip(documents.offsets[:-1], documents.offsets[1:], strict=True)
    ] == [texts[n] for n in good]
    assert documents.text_bytes.tolist() == [len(texts[n].encode()) for n in good]
    assert part.held_out.tolist() == [is_held_out(rows[n], share) for n in good]


def test_the_split_of_a_content_is_what_it_always_was() -> None:
    rows = [Row(text=f"document {n}") for n in range(2000)]
    assert [n for n, row in enumerate(rows) if is_held_out(row, 0.005)] == HELD_OUT
    assert all(is_held_out(row, 1.0) for row in rows)
    assert not any(is_held_out(row, 0.0) for row in rows)
