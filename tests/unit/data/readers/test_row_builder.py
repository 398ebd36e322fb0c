"""Conversations in the common schemas, and the sentence for what is none of them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foundling.config.errors import ConfigError, DataError
from foundling.data.open_source import open_source
from foundling.data.readers.source import ReadOptions, unusable

Chat = list[dict[str, str]]


def said(*turns: str) -> Chat:
    """ "u:hello", "a:hi", "s:be brief" as messages."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]


def human(*turns: str) -> Chat:
    """The same in ShareGPT's names."""
    roles = {"s": "system", "u": "human", "a": "gpt"}
    return [{"from": roles[turn[0]], "value": turn[2:]} for turn in turns]


def read(folder: Path, rows: list[Any], **options: Any) -> tuple[list[Any], Counter[str]]:
    """Messages, or the problem, of each row; the same from JSONL and, where it can, Parquet."""
    tally: Counter[str] = Counter()
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = _read(folder / "a.jsonl", tally, options)
    if all(isinstance(row, dict) for row in rows):
        try:
            names = {name: None for row in rows for name in row}
            table = pa.table({name: [row.get(name) for row in rows] for name in names})
        except (pa.ArrowException, TypeError):
            return found, tally
        pq.write_table(table, folder / "a.parquet")
        assert _read(folder / "a.parquet", Counter(), options) == found
    return found, tally


def _read(path: Path, tally: Counter[str], options: dict[str, Any]) -> list[Any]:
    source = open_source(str(path), options=ReadOptions(**options))
    assert source.kind == "chat"
    rows = [row for piece in source.pieces() for row in piece.rows(tally)]
    return [row.messages if row.problem is None else row.problem for row in rows]


ASKED = said("u:who?", "a:Ada")
KNOWN: dict[str, tuple[dict[str, Any], Chat]] = {
    "messages": ({"messages": ASKED}, ASKED),
    "sharegpt": ({"conversations": human("u:who?", "a:Ada")}, ASKED),
    "bare texts in turn": ({"conversations": ["who?", "Ada"]}, ASKED),
    "both names, one of them empty": (
        {"messages": [{**turn, "from": None, "value": None} for turn in ASKED]},
        ASKED,
    ),
    "sharegpt with a system": (
        {"conversations": human("u:who?", "a:Ada"), "system": "be brief"},
        said("s:be brief", "u:who?", "a:Ada"),
    ),
    "an empty system": ({"messages": said("s: ", "u:who?", "a:Ada"), "system": ""}, ASKED),
    "the turns' own system counts": (
        {"messages": said("s:own", "u:who?", "a:Ada"), "system": "column"},
        said("s:own", "u:who?", "a:Ada"),
    ),
    "tool calls": (
        {
            "conversations": [
                {"from": "human", "value": "time?"},
                {"from": "function_call", "value": "clock()"},
                {"from": "observation", "value": "12:00"},
                {"from": "gpt", "value": "noon"},
            ],
            "tools": '[{"name": "clock"}]',
        },
        said('s:Tools:\n[{"name": "clock"}]', "u:time?", "a:clock()", "u:12:00", "a:noon"),
    ),
    "tool calls beside a text": (
        {
            "messages": [
                {"role": "user", "content": "time?"},
                {"role": "assistant", "content": "I look.", "tool_calls": [{"name": "clock"}]},
                {"role": "tool", "content": "12:00"},
                {"role": "assistant", "content": None, "function_call": {"name": "clock"}},
            ]
        },
        said("u:time?", 'a:I look.\n[{"name": "clock"}]', "u:12:00", 'a:{"name": "clock"}'),
    ),
    "a message that is not learned": (
        {"messages": [*ASKED[:1], {**ASKED[1], "weight": 0}, {**ASKED[1], "weight": 1.0}]},
        [*ASKED[:1], {**ASKED[1], "weight": 0}, ASKED[1]],
    ),
    "alpaca": ({"instruction": "who?", "input": "", "output": "Ada"}, ASKED),
    "alpaca with an input": (
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        said("u:Add.\n\n1 2", "a:3"),
    ),
    "alpaca with a history": (
        {"instruction": "who?", "output": "Ada", "history": [["hello", "hi"]]},
        said("u:hello", "a:hi", "u:who?", "a:Ada"),
    ),
    "dolly": (
        {"instruction": "who?", "context": "Ada.", "response": "Ada"},
        said("u:who?\n\nAda.", "a:Ada"),
    ),
    "prompt and completion": (
        {"prompt": "[INST] who?", "completion": "Ada"},
        said("u:[INST] who?", "a:Ada"),
    ),
    "prompt and completion as messages": (
        {"prompt": said("s:be brief", "u:who?"), "completion": said("a:Ada")},
        said("s:be brief", "u:who?", "a:Ada"),
    ),
    "question and answer": ({"question": "who?", "answer": "Ada"}, ASKED),
    "orca": (
        {"system_prompt": "be brief", "question": "who?", "response": "Ada"},
        said("s:be brief", "u:who?", "a:Ada"),
    ),
    "rejected and chosen text": ({"prompt": "who?", "chosen": "Ada", "rejected": "BAD"}, ASKED),
    "chosen conversations": (
        {"prompt": "who?", "chosen": ASKED, "rejected": said("u:who?", "a:BAD")},
        ASKED,
    ),
    "chosen answers to messages": (
        {"prompt": said("u:who?"), "chosen": said("a:Ada"), "rejected": said("a:BAD")},
        ASKED,
    ),
    "chosen in ShareGPT's names": (
        {
            "conversations": human("s:be brief", "u:who?"),
            "chosen": human("a:Ada")[0],
            "rejected": human("a:BAD")[0],
        },
        said("s:be brief", "u:who?", "a:Ada"),
    ),
    "chosen after an instruction": (
        {"instruction": "Add.", "input": "1 2", "chosen": "3", "rejected": "BAD"},
        said("u:Add.\n\n1 2", "a:3"),
    ),
    "chosen after a question": (
        {"system": "be brief", "question": "who?", "chosen": "Ada", "rejected": "BAD"},
        said("s:be brief", "u:who?", "a:Ada"),
    ),
    "turns inside the chosen text": (
        {
            "chosen": "\n\nHuman: hello\n\nAssistant: hi\n\nHuman: who?\n\nAssistant: Ada",
            "rejected": "\n\nHuman: hello\n\nAssistant: hi\n\nHuman: who?\n\nAssistant: BAD",
        },
        said("u:hello", "a:hi", "u:who?", "a:Ada"),
    ),
    "content in parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "who?"}]}, ASKED[1]]},
        ASKED,
    ),
    "calls without content": (
        {
            "messages": [
                {"role": "Developer", "content": "be brief"},
                {"role": "user", "content": "time?"},
                {"role": "assistant", "content": None, "tool_calls": [{"name": "clock"}]},
                {"role": "tool", "content": "12:00"},
            ]
        },
        said("s:be brief", "u:time?", 'a:[{"name": "clock"}]', "u:12:00"),
    ),
}


@pytest.mark.parametrize("case", KNOWN)
def test_known_schemas_become_turns(case: str, tmp_path: Path) -> None:
    row, wanted = KNOWN[case]
    found, tally = read(tmp_path, [row, row])
    assert found == [wanted, wanted]
    assert tally["rejected"] == (2 if "rejected" in row else 0)
    assert "BAD" not in json.dumps(found)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": None}, "`messages` is no list of messages"),
        ({"messages": "[{"}, "`messages` is no list of messages"),
        ({"messages": 5}, "`messages` is no list of messages"),
        ({"messages": ["hello", 5]}, "a message is str"),
        ({"messages": [{"content": "x"}]}, "a message has no role"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "a message has the role 'narrator'"),
        ({"messages": [{"role": "user", "content": None}]}, "a message of user has no text"),
        ({"messages": [{"role": "user", "content": 5}]}, "a message of user has no text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "a message of user has a part that is no text",
        ),
        ({"messages": ASKED, "system": 5}, "`system` is no text"),
        (
            {"messages": [ASKED[0], {**ASKED[1], "weight": 0.5}]},
            "a message has the weight 0.5, neither 0 nor 1",
        ),
    ],
)
def test_bad_conversations_are_problems(row: Any, reason: str, tmp_path: Path) -> None:
    found, _ = read(tmp_path, [{"messages": ASKED}, row, {"messages": ASKED}])
    assert found == [ASKED, reason, ASKED]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"instruction": "", "output": "x"}, "no `instruction`"),
        ({"instruction": "who?", "output": None}, "no `output`"),
        ({"instruction": "who?", "output": ["Ada", "BAD"]}, "a message is str"),
        ({"instruction": "who?", "input": 5, "output": "x"}, "`input` is no text"),
        ({"instruction": "a", "output": "x", "history": 5}, "`history` is no list of pairs"),
        ({"instruction": "a", "output": "x", "history": ["ab"]}, "`history` is no list of pairs"),
        ({"chosen": "Ada", "rejected": "BAD"}, "a chosen answer, and nothing that it answers"),
        ({"prompt": "who?", "chosen": None, "rejected": "BAD"}, "no `chosen`"),
    ],
)
def test_bad_rows_of_other_schemas_are_problems(row: Any, reason: str, tmp_path: Path) -> None:
    assert read(tmp_path, [row])[0] == [reason]


def test_answers_with_a_false_label_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [
        {"prompt": "who?", "completion": text, "label": label}
        for text, label in (("Ada", True), ("BAD", False), ("Ada", None))
    ]
    found, tally = read(tmp_path, rows)
    assert found == [ASKED, ASKED]
    assert tally == {"rejected": 1}
    csv = "prompt,completion,label\nwho?,Ada,True\nwho?,BAD,False\n"
    (tmp_path / "a.csv").write_text(csv)
    assert [row.messages for row in open_source(str(tmp_path / "a.csv"))] == [ASKED]


def test_a_conversation_in_a_table_of_text_is_json(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text(
        'n\tmessages\n1\t"{}"\n'.format(json.dumps(ASKED).replace('"', '""'))
    )
    assert [row.messages for row in open_source(str(tmp_path / "a.tsv"))] == [ASKED]


def test_a_column_of_conversations_may_have_any_name(tmp_path: Path) -> None:
    rows = [{"talk": ASKED, "text": "x"}]
    assert read(tmp_path, rows, schema="messages", text="talk")[0] == [ASKED]
    both = [{"instruction": "x", "output": "y", "conversations": human("u:who?", "a:Ada")}]
    assert read(tmp_path, both)[0] == [ASKED]
    assert read(tmp_path, both, schema="alpaca")[0] == [said("u:x", "a:y")]


def _refusal(folder: Path, rows: list[Any], **options: Any) -> str:
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises((DataError, ConfigError)) as caught:
        open_source(str(folder), options=ReadOptions(**options))
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


def test_what_matches_nothing_is_refused_with_its_columns(tmp_path: Path) -> None:
    sentence = _refusal(tmp_path, [{"Body": "x", "Answer": 5}, {"ID": 1}])
    for word in ("a.jsonl", "Body, Answer, ID", "--text", "--template", "--schema"):
        assert word in sentence
    assert "no column `body`" in _refusal(tmp_path, [{"Body": "x"}], text="body")
    assert "nothing of the schema alpaca" in _refusal(tmp_path, [{"text": "x"}], schema="alpaca")
    assert "`Title`" in _refusal(tmp_path, [{"text": "x"}], template="{Title}")
    assert "`score`" in _refusal(tmp_path, [{"text": "x"}], where=("score>1",))
    (tmp_path / "a.jsonl").write_text("{\n{\n")
    with pytest.raises(DataError, match=r"no row that can be read \(not JSON\)"):
        open_source(str(tmp_path))


def test_text_and_conversations_are_never_mixed(tmp_path: Path) -> None:
    chat = {"messages": ASKED}
    assert "mixes text (text) and messages" in _refusal(tmp_path, [{"text": "x"}, chat])
    assert "mixes bare text and messages" in _refusal(tmp_path, ["x", chat])
    alpaca = {"instruction": "x", "output": "y"}
    assert "mixes messages (messages) and alpaca" in _refusal(tmp_path, [chat, alpaca])
    rows = [{"text": "x", "kind": "t"}, {**chat, "kind": "c"}]
    assert read(tmp_path, rows, where=("kind=c",))[0] == [ASKED]
    (tmp_path / "b.txt").write_text("plain")
    (tmp_path / "a.jsonl").write_text(json.dumps(chat))
    with pytest.raises(DataError, match=r"mixes text \(b\.txt\) and conversations \(a\.jsonl\)"):
        open_source(str(tmp_path))


def test_a_column_without_text_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"`text` of a\.parquet holds int64"):
        open_source(str(tmp_path / "a.parquet"))
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="its columns are body"):
        open_source(str(tmp_path / "a.parquet"))


def test_rows_after_the_first_are_judged_one_by_one(tmp_path: Path) -> None:
    rows = [*([{"messages": ASKED}] * 64), {"text": "late"}, {"messages": said("u:alone")}]
    found, _ = read(tmp_path, rows)
    assert found[:64] == [ASKED] * 64
    assert found[64] == "`messages` is no list of messages"
    source = open_source(str(tmp_path / "a.jsonl"))
    assert unusable(list(source)[65], chat=True) == "no assistant turn"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schema": "poems"}, "no schema"),
        ({"normalise": "nfkc"}, "nfkc"),
        ({"max_chars": 0}, "max_chars"),
        ({"text": "a", "template": "{b}"}, "exclude"),
        ({"template": "{b}", "schema": "alpaca"}, "plain text"),
        ({"text": "a", "schema": "preference"}, "no effect"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ReadOptions(**options)
