"""What `data inspect` shows: pieces, boundaries and the loss mask, with and without colour."""

from pathlib import Path

import pytest
from rich.console import Console

from foundling.cli.main import run_verb
from foundling.config.errors import ConfigError
from foundling.data.build.build import build
from foundling.data.dataset import DataSet
from foundling.data.inspect_rows import (
    CUT,
    chat_tokens,
    coloured,
    inspect_rows,
    inspect_source,
    plain_lines,
    text_tokens,
    token_table,
    turns,
)
from foundling.data.readers.source import Row
from foundling.tokenizer.bpe_trainer import train_tokenizer
from foundling.tokenizer.tokenizer import Tokenizer
from tests.village import Village

CHAT = [
    {"role": "user", "content": "hi [bold]"},
    {"role": "assistant", "content": "ok"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["hi ok"], 263)


def printed(*what: object, colour: bool = False) -> str:
    console = Console(
        width=200, force_terminal=colour, color_system="standard" if colour else None, record=True
    )
    with console.capture() as capture:
        console.print(*what)
    return capture.get()


def test_plain_lines_bracket_exactly_what_the_loss_counts(tokenizer: Tokenizer) -> None:
    (line,) = plain_lines(chat_tokens(CHAT, tokenizer))
    assert line == ("| <|bos|> <|user|> h i · [ b o l d ] <|end|> <|assistant|> [o] [k] [<|end|>]")
    (line,) = plain_lines(text_tokens("ok", tokenizer))
    assert line == "| <|bos|> [o] [k] [<|eos|>]"
    assert len(plain_lines(text_tokens("ok " * 40, tokenizer), width=60)) > 3


def test_colour_says_the_same(tokenizer: Tokenizer) -> None:
    text = coloured(chat_tokens(CHAT, tokenizer))
    counted = "".join(
        text.plain[span.start : span.end] for span in text.spans if "green" in str(span.style)
    )
    assert counted == "ok<|end|>"
    assert "[bold]" in text.plain
    assert "\x1b[" in printed(text, colour=True)


def test_the_table_has_a_line_a_token(tokenizer: Tokenizer) -> None:
    tokens = chat_tokens(CHAT, tokenizer)
    lines = printed(token_table(tokens)).splitlines()
    assert len(lines) == len(tokens) + 1
    assert str(tokenizer.end_id) in lines[-1]
    assert lines[-1].rstrip().endswith("yes")


def test_rows_show_documents_padding_and_counts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [Row(text=word, split="train") for word in ("hi", "oh")]
    build(rows, tokenizer, tmp_path / "d", name="t", kind="text")
    data = DataSet(tmp_path / "d")
    options = {"seq_len": 10, "packing": "bestfit", "count": 1}
    (plain,) = inspect_rows(data, tokenizer, colour=False, **options)  # type: ignore[arg-type]
    title, line = printed(plain).splitlines()
    assert title == "row 0: 8 tokens of 10 positions, 6 counted, 2 documents"
    assert line.count("| <|bos|>") == 2
    assert line.endswith("(2 padding)")
    assert line.count("[<|eos|>]") == 2
    (full,) = inspect_rows(data, tokenizer, ids=True, **options)  # type: ignore[arg-type]
    shown = printed(full)
    assert "▌<|bos|>" in shown
    assert len(shown.splitlines()) == 2 + 1 + 8


TALK = [
    {"role": "system", "content": "ok"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ok ok"},
]


def test_turns_hold_every_token_and_say_who_speaks(tokenizer: Tokenizer) -> None:
    tokens = chat_tokens(TALK, tokenizer)
    parts = turns(tokens, tokenizer)
    assert [role for role, _ in parts] == ["system", "user", "assistant"]
    assert [token for _, part in parts for token in part] == tokens
    assert parts[0][1][0].id == tokenizer.bos_id
    cut = turns(tokens[4:], tokenizer)
    assert [role for role, _ in cut] == [CUT, "user", "assistant"]
    assert [token for _, part in cut for token in part] == tokens[4:]


def test_chats_are_shown_turn_by_turn(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [Row(messages=TALK, split="train", where=str(n)) for n in range(2)]
    build(rows, tokenizer, tmp_path / "d", name="t", kind="chat", keep_duplicates=True)
    data = DataSet(tmp_path / "d")
    # 17 tokens each: the second row begins inside the second conversation.
    options = {"seq_len": 20, "packing": "concat", "colour": False}
    first, second = inspect_rows(data, tokenizer, **options)  # type: ignore[arg-type]
    lines = printed(first).splitlines()[1:]
    assert lines == [
        "   system  | <|bos|> <|system|> o k <|end|>",
        "     user  <|user|> h i <|end|>",
        "assistant  <|assistant|> [o] [k] [·] [o] [k] [<|end|>]",
        "   system  | <|bos|> <|system|> o k",
    ]
    lines = printed(second).splitlines()[1:]
    assert lines[0] == f"{CUT:>9}  | <|end|>"
    assert lines[-1].strip() == "(8 padding)"
    options["colour"] = True
    (shown, _) = inspect_rows(data, tokenizer, **options)  # type: ignore[arg-type]
    assert printed(shown).count("▌") == 2


def test_a_source_shows_what_its_rows_would_become(tokenizer: Tokenizer) -> None:
    rows = [
        Row(text="hi", where="a:1", split="train"),
        Row(text="h\x00i", where="a:2"),
        Row(messages=TALK, where="a:3", split="val", kind="chat"),
        Row(text=None, problem="no JSON", where="a:4"),
    ]
    parts = [printed(p) for p in inspect_source(rows, tokenizer, count=9, colour=False)]
    assert parts[0].splitlines()[0] == "row 0 (a:1): 4 tokens, 3 counted, kind text, for training"
    assert "to quarantine, NUL" in parts[1]
    assert "\x00" not in parts[1]
    assert "held out" in parts[2]
    assert "assistant  <|assistant|> [o]" in parts[2]
    assert "to quarantine, no JSON" in parts[3]
    only = list(inspect_source(rows, tokenizer, first=2, count=1))
    assert len(only) == 1


def test_the_verb_shows_sources_and_held_out_rows(
    village: Village, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("first text\n\nsecond text\n")
    run_verb(["data", "inspect", str(tmp_path / "a.txt"), "--tokenizer", str(village.tokenizer)])
    said = capsys.readouterr().out
    assert "row 1 (a.txt:3)" in said
    run_verb(["data", "inspect", str(village.chat), "--val", "--rows", "1"])
    assert "val split" in capsys.readouterr().out
    source = [str(tmp_path / "a.txt"), "--tokenizer", str(village.tokenizer)]
    for words, named in (
        (source[:1], "--tokenizer"),
        ([*source, "--first", "9"], "row 9"),
        ([*source, "--packing", "pad"], "--packing has no effect on .*a.txt"),
        ([*source, "--seq-len", "64"], "--seq-len has no effect on .*a.txt"),
        ([str(village.text), "--tokenizer", str(village.tokenizer)], "its own tokenizer"),
        ([str(village.text), "--first", "999999"], "outside"),
    ):
        with pytest.raises(ConfigError, match=named):
            run_verb(["data", "inspect", *words])
