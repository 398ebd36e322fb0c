"""Tokenizers and chat templates from elsewhere that are not as they should be."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Whitespace

from foundling.config.errors import DataError
from foundling.tokenizer.chat_template import ForeignTokenizer, find_template


def write_bytes(folder: Path) -> None:
    """A tokenizer that knows every byte."""
    letters = sorted(ByteLevel.alphabet())
    engine = tokenizers.Tokenizer(BPE({letter: n for n, letter in enumerate(letters)}, []))
    engine.pre_tokenizer = ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    engine.save(str(folder / "tokenizer.json"))


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not valid UTF-8"):
        find_template(tmp_path)


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    several = ["x", {"name": "tools", "template": "a"}, {"name": "default", "template": "b"}]
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({"chat_template": several}))
    assert find_template(tmp_path) == "b"
    file.write_text(json.dumps({"chat_template": ["x"]}))
    assert find_template(tmp_path) is None


def test_a_template_that_makes_half_a_character_is_refused(tmp_path: Path) -> None:
    write_bytes(tmp_path)
    template = {"chat_template": "\ud800{{messages[0].content}}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(template))
    with pytest.raises(DataError, match="chat template makes no text"):
        ForeignTokenizer.open(tmp_path).prompt([{"role": "user", "content": "hello"}])


def test_a_word_without_a_token_is_refused(tmp_path: Path) -> None:
    engine = tokenizers.Tokenizer(WordLevel({"the": 0, "ferry": 1}))
    engine.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    engine.save(str(tmp_path / "tokenizer.json"))
    found = ForeignTokenizer.open(tmp_path)
    assert found.encode("the ferry") == [0, 1]
    with pytest.raises(DataError, match="the tokenizer cannot encode a text"):
        found.encode("the bridge")
