"""10,000 fuzzed rows: each ends usable, or in quarantine with its place and a reason.

A case knows its verdict: good rows must come out as they went in, bad ones must not come out at
all. Rows of pure noise have no known verdict and must only not raise.
"""

import csv
import io
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundling.data.open_source import open_source
from foundling.data.readers.columns import ColumnMapping
from foundling.data.readers.row_builder import RowBuilder
from foundling.data.readers.source import (
    ReadOptions,
    Row,
    excerpt,
    is_held_out,
    text_bytes,
    unusable,
)
from foundling.tokenizer.chat import role_and_content

LIMIT = 2000
SEED = 4


class Case(NamedTuple):
    """A line of JSON, and what must become of it."""

    line: bytes
    good: bool | None
    """None: nobody can say."""
    text: str = ""


def words(rand: random.Random) -> str:
    alphabet = ["mill", "goat", "é", "東京", "😀", '"', "\\", "\t", ",", "\n", "{", "]", "\u2028"]
    return "w " + " ".join(rand.choices(alphabet, k=rand.randint(1, 30)))


def noise(rand: random.Random, depth: int = 0) -> Any:
    """Any value that JSON can hold, and some that it should not."""
    pick = rand.randrange(10 if depth < 4 else 7)
    if pick > 8:
        return {words(rand)[:5]: noise(rand, depth + 1) for _ in range(rand.randint(0, 3))}
    if pick > 6:
        return [noise(rand, depth + 1) for _ in range(rand.randint(0, 3))]
    return [None, True, 10**400, -1.5, "", "\x00", "\ud800", rand.random()][pick]


NO_TEXTS = [None, 5, 10**300, 2.5, True, [], ["x"], {}, {"text": "x"}, [[[[]]]]]
BAD_TEXTS = ["", " \n\t", "a\x00b", "a\ud800", "\udcff", "x" * (LIMIT + 1)]


def bad_texts(rand: random.Random) -> Any:
    return rand.choice([*NO_TEXTS, *BAD_TEXTS])


def noisy_line(rand: random.Random) -> bytes:
    pick = rand.randrange(6)
    if pick == 0:
        return bytes(b for b in rand.randbytes(rand.randint(1, 60)) if b != 10) + b"\x01"
    if pick == 1:
        return b'{"text": "' + b"[" * rand.randint(1, 50)
    if pick == 2:
        return b"[" * 100_000 + b"]" * 100_000
    if pick == 3:
        return b'{"text": ' + b"9" * 5000 + b"}"
    if pick == 4:
        return b'{"text": "a", "text": ' + rand.choice([b"NaN", b"-Infinity", b"1e999"]) + b"}"
    return json.dumps(rand.choice([1, None, [1], {}, {"other": 1}])).encode()


def text_case(rand: random.Random) -> Case:
    pick = rand.random()
    if pick < 0.4:
        text = words(rand)
        extra = {"score": noise(rand)} if rand.random() < 0.5 else {}
        return Case(json.dumps({"text": text, **extra}).encode(), True, text)
    if pick < 0.7:
        return Case(json.dumps({"text": bad_texts(rand)}).encode(), False)
    if pick < 0.8:
        raw = json.dumps({"text": "caf? " + "goat " * 3}, ensure_ascii=False).encode()
        return Case(raw.replace(b"?", rand.choice([b"\xff", b"\xc3", b"\xed\xa0\x80"])), False)
    if pick < 0.95:
        return Case(noisy_line(rand), False)
    return Case(json.dumps({"text": noise(rand)}).encode(), None)


def chat_case(rand: random.Random) -> Case:
    pick = rand.random()
    text = words(rand)
    ask = {"role": "user", "content": "who?"}
    if pick < 0.4:
        return Case(
            json.dumps({"messages": [ask, {"role": "assistant", "content": text}]}).encode(),
            True,
            text,
        )
    if pick < 0.6:
        answer = {"role": "assistant", "content": bad_texts(rand)}
        known = answer["content"] not in (["x"],)  # a part that is text is text
        return Case(json.dumps({"messages": [ask, answer]}).encode(), False if known else None)
    if pick < 0.7:
        messages = rand.choice([None, 5, "x", [], [5], [None], [[]], [{}], [ask], {"a": 1}, True])
        return Case(json.dumps({"messages": messages}).encode(), False)
    if pick < 0.8:
        return Case(noisy_line(rand), False)
    message = {"role": noise(rand), "content": noise(rand), "tool_calls": noise(rand)}
    row = {"messages": [ask, message, noise(rand)], "system": noise(rand), "tools": noise(rand)}
    return Case(json.dumps(row).encode(), None)


def judge(row: Row, chat: bool, name: str) -> str | None:
    """The verdict on a row, after doing to it everything that a build does."""
    reason = unusable(row, chat)
    assert row.where.startswith(f"{name}:")
    assert row.where.rpartition(":")[2].isdigit()
    if reason is not None:
        entry = {"where": row.where, "reason": reason, "excerpt": excerpt(row)}
        assert reason.strip()
        assert len(json.dumps(entry).encode()) < 5000
        return reason
    size = text_bytes(row)
    assert 0 < size <= 4 * LIMIT
    is_held_out(row, 0.5)
    texts = [row.text] if not chat else [role_and_content(m)[1] for m in row.messages or ()]
    assert all(text and text.encode() and "\x00" not in text for text in texts)
    return None


def check(path: Path, cases: list[Case], places: list[int], chat: bool) -> Counter[bool]:
    """Read the file and hold every row against its case."""
    options = ReadOptions(max_chars=LIMIT, schema="messages" if chat else "text")
    source = open_source(str(path), options=options)
    rows = list(source)
    assert source.kind == ("chat" if chat else "text")
    assert [row.where for row in rows] == [f"{path.name}:{place}" for place in places]
    seen: Counter[bool] = Counter()
    for row, case in zip(rows, cases, strict=True):
        reason = judge(row, chat, path.name)
        seen[reason is None] += 1
        if case.good is not None:
            assert (reason is None) == case.good, (case.line[:200], reason)
        if case.good:
            said = row.text if not chat else role_and_content((row.messages or ())[-1])[1]
            assert said == case.text
    return seen


def make(count: int, case: Callable[[random.Random], Case]) -> list[Case]:
    rand = random.Random(SEED)
    first = next(one for one in iter(lambda: case(rand), None) if one.good)
    return [first, *(case(rand) for _ in range(count - 1))]


@pytest.mark.parametrize(
    ("case", "chat", "count"), [(text_case, False, 2500), (chat_case, True, 2500)]
)
def test_lines_of_json(
    case: Callable[[random.Random], Case], chat: bool, count: int, tmp_path: Path
) -> None:
    cases = make(count, case)
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(one.line for one in cases))
    seen = check(tmp_path / "a.jsonl", cases, list(range(1, count + 1)), chat)
    assert min(seen.values()) > count // 4


def test_lists_of_json(tmp_path: Path) -> None:
    """What is balanced can be stepped over; the rest ends the file and is in other tests."""
    rand = random.Random(SEED)
    cases: list[Case] = []
    while len(cases) < 1500:
        one = text_case(rand)
        balanced = one.line[:1] == b"{" and not one.line.startswith(b'{"text": "[')
        if balanced or one.line[:200] == b"[" * 200:
            cases.append(one)
    body = b"[" + b" ,\n ".join(one.line for one in cases) + b"]\n"
    (tmp_path / "a.json").write_bytes(body)
    seen = check(tmp_path / "a.json", cases, list(range(1500)), chat=False)
    assert min(seen.values()) > 300


def test_rows_of_csv(tmp_path: Path) -> None:
    rand = random.Random(SEED)
    cases, places, body = [], [], b"n,text\n"
    for number in range(1000):
        text = words(rand) if rand.random() < 0.6 else rand.choice(["", " ", "a\x00b", "x" * 2001])
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerow([number, text])
        line = out.getvalue().encode()
        good = text.startswith("w ")
        pick = rand.random()
        if pick < 0.1:
            line, good = line.replace(b",", b",,", 1), False
        elif pick < 0.2:
            line, good = line.replace(b"w", b"w\xff", 1) if good else b"\xfe,x\n", False
        elif pick < 0.3:
            line, good = b'1,"quoted"badly\n', False
        cases.append(Case(line, good, text))
        places.append(body.count(b"\n") + 1)
        body += line
    (tmp_path / "a.csv").write_bytes(body)
    seen = check(tmp_path / "a.csv", cases, places, chat=False)
    assert min(seen.values()) > 200


def test_plain_text(tmp_path: Path) -> None:
    rand = random.Random(SEED)
    cases, places, body = [], [], b""
    for _ in range(1000):
        text = "\n".join(line for line in words(rand).split("\n") if line.strip())
        data, good = text.encode(), True
        pick = rand.random()
        if pick < 0.2:
            data, good = data + rand.choice([b"\xff", b"\xc3", b"\x00", b"\xed\xb2\x80"]), False
        elif pick < 0.3:
            data, good = b"x" * (LIMIT + 1), False
        cases.append(Case(data, good, text))
        places.append(body.count(b"\n") + 1)
        body += data + rand.choice([b"\n\n", b"\n \t\n", b"\r\n\r\n", b"\n\n\n\n"])
    (tmp_path / "a.txt").write_bytes(body)
    seen = check(tmp_path / "a.txt", cases, places, chat=False)
    assert min(seen.values()) > 200


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_columns(name: str, tmp_path: Path) -> None:
    rand = random.Random(SEED)
    cases: list[Case] = []
    for _ in range(750):
        text = words(rand)
        bad = [b"", b" ", b"a\x00", b"\xff", b"\xed\xa0\x80", b"x" * (LIMIT + 1)]
        good = rand.random() < 0.7
        cases.append(Case(text.encode() if good else rand.choice(bad), good, text))
    raw = [case.line for case in cases]
    raw[7], cases[7] = None, Case(b"", False)  # type: ignore[call-overload]
    table = pa.table({"text": pa.array(raw, pa.binary()).view(pa.string())})
    if name == "a.parquet":
        pq.write_table(table, tmp_path / name, row_group_size=50)
    else:
        with pa.ipc.new_file(tmp_path / name, table.schema) as out:
            out.write_table(table, max_chunksize=100)
    seen = check(tmp_path / name, cases, list(range(750)), chat=False)
    assert min(seen.values()) > 150


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.binary(max_size=3)
VALUES = st.recursive(
    SCALARS | st.text(max_size=5) | st.just("[{}]") | st.just("\n\nHuman: a\n\nAssistant: b"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "from", "content", "value", "text", "type", "tool_calls"]),
            inner | st.sampled_from(["user", "gpt", "tool", "system"]),
            max_size=4,
        )
    ),
    max_leaves=8,
)
LAYOUTS = [
    ColumnMapping("text", ("text",)),
    ColumnMapping("messages", ("messages",)),
    ColumnMapping("sharegpt", ("conversations",)),
    ColumnMapping("alpaca", ("instruction", "output")),
    ColumnMapping("prompt-completion", ("prompt", "completion")),
    ColumnMapping("preference", ("chosen", "rejected")),
]


@settings(max_examples=400, deadline=None)
@given(st.data(), st.sampled_from(LAYOUTS))
def test_any_value_in_any_schema(data: st.DataObject, layout: ColumnMapping) -> None:
    names = st.sampled_from(layout.reads() + layout.columns * 3)
    row = data.draw(st.dictionaries(names, VALUES, max_size=6) | VALUES)
    tally: Counter[str] = Counter()
    options = ReadOptions(max_chars=LIMIT, normalise="nfc")
    maker = RowBuilder(source="s", file="f", layout=layout, options=options, tally=tally)
    made = maker.record(row, 1)
    if made is None:
        assert tally["rejected"] == 1
        return
    judge(made, layout.kind == "chat", "f")
