"""Documents that come together are cut, judged and split as if each had come alone."""

from hypothesis import given
from hypothesis import strategies as st

from foundling.data.build.encode import EncodeBatch, parts_of, sort
from foundling.data.readers.source import Row, Texts, falls_into_val, flat, is_held_out

HELD_OUT = [305, 346, 700, 1212, 1530, 1872, 1882]
"""By the hash that the first version had."""
TEXTS = st.lists(st.sampled_from(["a", "bb ", "c" * 7, "", " \n", "d\x00e", "ü" * 5]), max_size=12)


def lots_of(runs: list[tuple[bool, list[str]]]) -> list[EncodeBatch]:
    lots: list[EncodeBatch] = []
    place = 0
    for together, texts in runs:
        places = range(place, place + len(texts))
        if together:
            lots.append(Texts(texts, "source", "file", places))
        else:
            lots += [
                Row(text=text, source="source", where=f"file:{n}")
                for n, text in zip(places, texts, strict=True)
            ]
        place += len(texts)
    return lots


@given(st.lists(st.tuples(st.booleans(), TEXTS), max_size=6), st.integers(1, 9), st.integers(1, 20))
def test_where_a_part_ends_depends_on_the_rows_alone(
    runs: list[tuple[bool, list[str]]], most_rows: int, most_chars: int
) -> None:
    apart = [(False, texts) for _, texts in runs]
    found = [list(flat(run)) for run in parts_of(lots_of(runs), most_rows, most_chars)]
    wanted = [list(flat(run)) for run in parts_of(lots_of(apart), most_rows, most_chars)]
    assert found == wanted
    for rows in found[:-1]:
        texts = [row.text or "" for row in rows]
        assert len(texts) == most_rows or sum(map(len, texts)) >= most_chars
        assert len(texts) <= most_rows
        assert sum(map(len, texts[:-1])) < most_chars


@given(st.lists(st.tuples(st.booleans(), TEXTS), max_size=6), st.floats(0, 1))
def test_rows_are_judged_alike_together_and_apart(
    runs: list[tuple[bool, list[str]]], val_share: float
) -> None:
    found = sort(lots_of(runs), chat=False, val_share=val_share)
    rows = list(flat(lots_of(runs)))
    assert found.rows == len(rows)
    good = [
        n for n, row in enumerate(rows) if row.text and row.text.strip() and "\x00" not in row.text
    ]
    assert found.places == good
    assert [note["row"] for note in found.quarantine] == sorted(set(range(len(rows))) - set(good))
    assert [note["where"] for note in found.quarantine] == [
        f"file:{note['row']}" for note in found.quarantine
    ]
    assert found.contents == [rows[n].text for n in good]
    assert found.sizes == [len((rows[n].text or "").encode()) for n in good]
    held_out = [value for some in found.held_out for value in some.tolist()]
    assert held_out == [is_held_out(rows[n], val_share) for n in good]


def test_the_split_of_a_content_is_what_it_always_was() -> None:
    contents = [f"document {n}".encode() for n in range(2000)]
    held_out = [n for n, content in enumerate(contents) if falls_into_val(content, 0.005)]
    assert held_out == HELD_OUT
    assert all(falls_into_val(content, 1.0) for content in contents)
    assert not any(falls_into_val(content, 0.0) for content in contents)
