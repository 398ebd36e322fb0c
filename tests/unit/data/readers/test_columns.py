"""Filters mean the same in every format; templates, normal forms and limits."""

import json
import math
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundling.config.errors import ConfigError
from foundling.data.open_source import open_source
from foundling.data.readers.columns import Filter, lookup, parse_filters
from foundling.data.readers.source import ReadOptions

INTS = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3)
FLOATS = st.floats() | st.sampled_from([0.0, -0.0, 1.5, 3.0])
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=3) | st.sampled_from(["3", "ab"])
WANTED = st.one_of(
    INTS.map(str),
    FLOATS.map(repr),
    TEXTS,
    st.sampled_from(["true", "False", "nan", "-inf", "1e400"]),
)


@settings(max_examples=300, deadline=None)
@given(st.none() | INTS | FLOATS | TEXTS | st.booleans(), WANTED)
def test_unequal_is_exactly_not_equal(value: object, wanted: str) -> None:
    assert Filter("x", "=", wanted).holds(value) is not Filter("x", "!=", wanted).holds(value)


@pytest.mark.parametrize(
    ("text", "value", "kept"),
    [
        ("score>=3", 3, True),
        ("score=3.0", "3", True),
        ("score!=3", "3.0", False),
        ("score=3", "three", False),
        ("score>=3", "3.5", True),
        ("score>=3", "many", False),
        ("score>=3", None, False),
        ("score > 9007199254740992", 9007199254740993, True),
        ("score<2.5", 2, True),
        ("score<-1", math.nan, False),
        ("language=en", "en", True),
        ("language==en", "EN", False),
        ("language!=en", None, True),
        ("language!=en", ["en"], True),
        ("ok=true", True, True),
        ("ok=TRUE", True, True),
        ("ok=1", True, False),
        ("title~^The .*=", "The a=b", True),
        ("title~^The", "On The", False),
        ("title~4", 1945, True),
        ("title~x", None, False),
        ("date>=2024-02", "2024-10-01", True),
        ("date>=2024-02", "2023-10-01", False),
    ],
)
def test_filters_say_what_they_mean(text: str, value: object, kept: bool) -> None:
    (one,) = parse_filters([text])
    assert one.holds(value) is kept
    assert one.accepts({one.column: value}) is kept


@pytest.mark.parametrize("text", ["", "score", ">3", "score 3", "title~(", "title~[", "a>", "a~"])
def test_a_filter_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="the filter"):
        parse_filters([text])


def test_dots_reach_into_values() -> None:
    row = {"meta": {"lang": "en", "a.b": 1}, "x.y": 2, "n": 5}
    assert lookup(row, "meta.lang") == "en"
    assert lookup(row, "x.y") == 2
    assert lookup(row, "n.y") is None
    assert lookup(row, "no.y") is None


def _both(folder: Path, rows: list[dict[str, Any]], **options: Any) -> tuple[list[str], Any]:
    """Places and texts of what is kept, and the tally: the same from JSONL and from Parquet."""
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet", row_group_size=3)
    found = []
    for name in ("a.jsonl", "a.parquet"):
        tally: Counter[str] = Counter()
        source = open_source(str(folder / name), options=ReadOptions(**options))
        got = [row for piece in source.pieces() for row in piece.rows(tally)]
        first = 1 if name == "a.jsonl" else 0
        places = [int(row.where.split(":")[1]) - first for row in got]
        found.append(
            ([f"{p} {row.problem or row.text}" for p, row in zip(places, got, strict=True)], tally)
        )
    assert found[0] == found[1]
    return found[0]


def test_filters_act_alike_in_rows_and_columns(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"text": f"t{n}", "n": n, "meta": {"lang": "en" if n % 2 else "de"}, "tags": [n]}
        for n in range(20)
    ]
    rows[4]["n"] = None
    rows[5]["text"] = None
    assert _both(tmp_path, rows, where=("n>=3", "meta.lang=de", "n<10")) == (
        ["6 t6", "8 t8"],
        {"filtered": 18},
    )
    kept, _ = _both(tmp_path, rows, where=("n!=7", "n<=8"))
    assert kept == ["0 t0", "1 t1", "2 t2", "3 t3", "5 no text", "6 t6", "8 t8"]
    # A list is no single value: it is never equal, and there is no order.
    assert _both(tmp_path, rows, where=("tags>=0",))[0] == []
    assert len(_both(tmp_path, rows, where=("tags!=3",))[0]) == 20


def test_a_template_writes_columns_and_says_what_is_missing(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"title": "A", "body": "x", "n": 1.5, "meta": {"by": "Ada"}, "list": [1]},
        {"title": None, "body": "y", "n": 2.0, "meta": {"by": "Bo"}, "list": []},
    ]
    kept, _ = _both(tmp_path, rows, template=r"# {title}\n\n{body}\t{{{n}}} {meta.by}")
    assert kept == ["0 # A\n\nx\t{1.5} Ada", "1 nothing to write for `title`"]
    assert _both(tmp_path, rows, template="{list}")[0][0] == "0 nothing to write for `list`"


@pytest.mark.parametrize("template", ["plain", "{", "{}", "a}b", "{a"])
def test_a_template_that_is_none_is_refused(template: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": "x"}')
    with pytest.raises(ConfigError, match="the template"):
        open_source(str(tmp_path / "a.jsonl"), options=ReadOptions(template=template))


def test_text_can_be_normalised_and_has_a_limit(tmp_path: Path) -> None:
    apart = unicodedata.normalize("NFD", "café")
    rows = [{"text": apart}, {"text": "x" * 11}, {"text": "y" * 10}]
    assert _both(tmp_path, rows, max_chars=10) == (
        [f"0 {apart}", "1 over the limit of 10 characters", "2 yyyyyyyyyy"],
        {},
    )
    assert _both(tmp_path, rows[:1], normalise="nfc")[0] == ["0 café"]
    chat = {"messages": [{"role": "user", "content": apart}, {"role": "assistant", "content": "x"}]}
    (tmp_path / "c.jsonl").write_text(json.dumps(chat))
    options = ReadOptions(normalise="nfc", max_chars=6)
    (row,) = open_source(str(tmp_path / "c.jsonl"), options=options)
    assert row.messages is not None
    assert row.messages[0]["content"] == "café"  # type: ignore[index]
    options = ReadOptions(max_chars=4)
    (row,) = open_source(str(tmp_path / "c.jsonl"), options=options)
    assert row.problem == "over the limit of 4 characters"


def test_plain_text_has_no_columns(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    for options in ({"text": "body"}, {"where": ("a=b",)}, {"template": "{a}"}):
        with pytest.raises(ConfigError, match=r"a\.txt is plain text and has no columns"):
            open_source(str(tmp_path / "a.txt"), options=ReadOptions(**options))
    with pytest.raises(ConfigError, match=r"a\.txt is plain text, not alpaca"):
        open_source(str(tmp_path / "a.txt"), options=ReadOptions(schema="alpaca"))
