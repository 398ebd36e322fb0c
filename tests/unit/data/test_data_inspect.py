"""What `data inspect` shows: pieces, boundaries and the loss mask, with and without colour."""

from pathlib import Path

import pytest
from rich.console import Console

from foundling.data import (
    DataSet,
    Row,
    build,
    chat_tokens,
    coloured,
    inspect_rows,
    plain_lines,
    text_tokens,
    token_table,
)
from foundling.tokenizer import Tokenizer, train_tokenizer

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
    options = {"seq_len": 10, "packing": "bestfit", "units": [0]}
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
