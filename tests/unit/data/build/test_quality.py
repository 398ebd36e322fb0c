"""datatrove's filters as a stage before the build."""

import json
import random
from pathlib import Path

import pytest
from build_samples import Numbers, documents, files, learn, make

from foundling.config.errors import ConfigError
from foundling.data.build.quality import filtered
from foundling.data.dataset import DataSet
from foundling.data.open_source import open_source
from foundling.tokenizer.tokenizer import Tokenizer

WORDS = (
    *(
        [
            "the",
            "baker",
            "of",
            "the",
            "village",
            "sold",
            "bread",
            "to",
            "everyone",
            "that",
            "would",
            "have",
            "it",
            "with",
            "butter",
            "and",
        ]
    ),
    *(
        [
            "a",
            "miller",
            "came",
            "to",
            "the",
            "river",
            "every",
            "morning",
            "and",
            "looked",
            "at",
            "the",
            "wheel",
            "for",
            "a",
            "long",
            "while",
        ]
    ),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return learn()


def prose(number: int, words: int = 120) -> str:
    """Text that the rules let pass."""
    rng = random.Random(number)
    sentences = [" ".join(rng.choices(WORDS, k=12)).capitalize() + "." for _ in range(words // 12)]
    return f"Letter {number}. " + " ".join(sentences)


def write(folder: Path) -> str:
    texts = [prose(number) for number in range(12)]
    texts.append("too short")
    texts.append("#### " * 200)
    texts.append(prose(3) + " Yours truly.")  # nearly a copy
    lines = [json.dumps({"text": text}) for text in texts]
    path = folder / "letters.jsonl"
    path.write_text("\n".join([*lines[:5], "{broken", *lines[5:]]) + "\n")
    return str(path)


def test_filters_leave_out_what_datatrove_says(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pytest.importorskip("datatrove")
    source = open_source(write(tmp_path))
    folder = tmp_path / "d"
    chosen = filtered([source], ["gopher-quality", "minhash"], folder, 2)
    manifest = make(chosen[0], tokenizer, folder, max_bad=0.2)
    stored = [
        text[7:-7]
        for split in ("train", "val")
        for text in documents(DataSet(folder, split=split), tokenizer)
    ]
    whole = [prose(number) for number in range(12) if number != 3]
    assert sorted(t for t in stored if not t.startswith("Letter 3.")) == sorted(whole)
    assert sum(t.startswith("Letter 3.") for t in stored) == 1
    assert manifest.recipe["result"]["filtered"] == 3
    assert manifest.recipe["source"]["filters"]["names"] == ["gopher-quality", "minhash"]
    (bad,) = (folder / "quarantine.jsonl").read_text().splitlines()
    assert json.loads(bad)["where"] == "letters.jsonl:6"
    assert make(chosen[0], tokenizer, folder) == manifest, "a finished build is not filtered again"
    assert not (folder / ".build").exists()


def test_an_interrupted_stage_begins_anew(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pytest.importorskip("datatrove")
    source = open_source(write(tmp_path))
    (chosen,) = filtered([source], ["c4-quality"], tmp_path / "d", 1)
    torn = tmp_path / "d" / ".build" / "filtered" / "0"
    torn.mkdir(parents=True)
    (torn / "00000.jsonl").write_text('{"text": "left over"}\n')
    make(chosen, tokenizer, tmp_path / "d", max_bad=0.2)
    (again,) = filtered([source], ["c4-quality"], tmp_path / "e", 1)
    make(again, tokenizer, tmp_path / "e", max_bad=0.2)
    assert files(tmp_path / "d") == files(tmp_path / "e")


def test_what_cannot_be_filtered_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="numbers is made by rules"):
        filtered([Numbers(draws=True)], ["minhash"], tmp_path, 1)
    with pytest.raises(ConfigError, match="talk is conversations"):
        filtered([Numbers(kind="chat", name="talk")], ["minhash"], tmp_path, 1)
    monkeypatch.setitem(__import__("sys").modules, "datatrove.pipeline.filters", None)
    with pytest.raises(ConfigError, match=r"foundling\[datatrove\]"):
        filtered([], ["minhash"], tmp_path, 1)
