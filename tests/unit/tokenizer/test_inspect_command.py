"""What `tokenizer inspect` counts, and that `tokenizer train` reads what it is told to."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bpe_samples import TEXT, sample

from foundling.cli.main import run_verb
from foundling.config.errors import ConfigError, DataError
from foundling.data.open_source import labelled_texts, training_texts
from foundling.data.readers.source import VAL_SHARE, Row, is_held_out
from foundling.tokenizer.bpe_trainer import measure
from foundling.tokenizer.tokenizer import Tokenizer


def test_a_measure_is_what_counting_by_hand_gives() -> None:
    tokenizer = sample("own")
    texts = ["the mill", "東京 7", "x  y\n"]
    ids = [tokenizer.encode(text) for text in texts]
    found = measure(tokenizer, texts)
    assert found.texts == 3
    assert found.bytes == 8 + 8 + 5
    assert found.words == 2 + 2 + 2
    assert found.tokens == sum(map(len, ids))
    pieces = [tokenizer._engine.id_to_token(id) for each in ids for id in each]
    assert found.single == sum(len(piece) == 1 for piece in pieces)
    assert 0 < found.single < found.tokens
    assert found.changed == 0
    assert found.bytes_per_token == 21 / found.tokens
    assert found.fertility == found.tokens / 6
    assert (found + found).to_json()["tokens"] == 2 * found.tokens


def test_a_text_that_does_not_come_back_is_counted() -> None:
    assert measure(sample("nfc"), ["e\u0301", "fine"]).changed == 1


def _corpus(path: Path) -> Path:
    rows = [
        {"text": f"{TEXT[n % 4]} {n}", "source": ("mill", "well")[n % 3 == 0]} for n in range(60)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_vocabularies_are_compared_by_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = _corpus(tmp_path / "corpus.parquet")
    for name, form in (("small", "own"), ("other", "gpt2")):
        sample(form).save(tmp_path / name)
    paths = [str(tmp_path / "small"), str(tmp_path / "other")]
    words = ["tokenizer", "inspect", *paths, "--source", str(corpus), "hamlet", "--bytes", "3000"]
    run_verb([*words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["tokenizers"]["small"]["fast"]
    sources = found["sources"]
    assert list(sources) == ["corpus.parquet mill", "corpus.parquet well", "hamlet", "all sources"]
    texts = labelled_texts(str(corpus), max_bytes=3000)
    for label, held in texts.items():
        row = sources[f"corpus.parquet {label}"]
        assert row["small"]["tokens"] == sum(map(len, sample("own").encode_batch(held)))
        assert row["other"]["bytes"] == sum(len(text.encode()) for text in held)
    total = [sources[name]["small"]["bytes"] for name in list(sources)[:3]]
    assert sources["all sources"]["small"]["bytes"] == sum(total)
    assert 3000 <= total[0] + total[1] < 3400
    run_verb(words)
    table = capsys.readouterr().out
    run_verb(["tokenizer", "inspect", *paths, "--encode", "the mill"])
    cut = capsys.readouterr().out
    told = [
        f"{path}: {len(sample(form).encode('the mill'))} tokens, 8 bytes"
        for path, form in zip(paths, ("own", "gpt2"), strict=True)
    ]
    assert [line for line in cut.splitlines() if "bytes" in line] == told
    for more, refused in (
        (["--chat"], "--chat has no effect without --encode"),
        (["--encode", "a", "--bytes", "3"], "--bytes has no effect with --encode"),
    ):
        with pytest.raises(ConfigError, match=refused):
            run_verb(["tokenizer", "inspect", *paths, *more])
    assert table.count("small") == table.count("other") == table.count("exact") / 2 == 4


def test_labels_are_told_apart_and_files_without_them_are_one(tmp_path: Path) -> None:
    corpus = _corpus(tmp_path / "corpus.parquet")
    found = labelled_texts(str(corpus), max_bytes=10**6)
    assert {label: len(texts) for label, texts in found.items()} == {"mill": 40, "well": 20}
    assert found["well"][0] == f"{TEXT[0]} 0"
    (tmp_path / "plain.txt").write_text("one\n\ntwo\n")
    assert labelled_texts(str(tmp_path / "plain.txt"), max_bytes=10**6) == {"": ["one", "two"]}
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(DataError, match="no text to measure"):
        labelled_texts(str(tmp_path / "empty.txt"), max_bytes=100)


def test_training_reads_sources_in_turn_up_to_its_budget_and_nothing_held_out(
    tmp_path: Path,
) -> None:
    for name in ("a", "b"):
        lines = [json.dumps({"text": f"{name} {n} " + "x" * 90}) for n in range(400)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    specs = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    texts = list(training_texts(specs, max_bytes=20_000))
    assert 20_000 <= sum(map(len, texts)) <= 20_200
    first = [text[0] for text in texts]
    assert first[:6] == ["a", "b", "a", "b", "a", "b"]
    assert abs(first.count("a") - first.count("b")) < 15  # but for rows that are held out
    everything = list(training_texts(specs, max_bytes=10**9))
    expected = [
        text
        for n in range(400)
        for text in (f"a {n} " + "x" * 90, f"b {n} " + "x" * 90)
        if not is_held_out(Row(text=text), VAL_SHARE)
    ]
    assert sorted(everything) == sorted(expected)
    assert len(expected) < 800


def test_one_long_document_does_not_burst_the_budget(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("é" * 50_000)
    texts = list(training_texts([str(tmp_path / "long.txt")], max_bytes=1001))
    assert texts == ["é" * 500]


def test_train_and_add_write_new_folders_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "one")
    words = ["tokenizer", "train", "hamlet", "hamlet:chat", "-o", out]
    run_verb([*words, "--bytes", "20000", "--vocab-size", "300"])
    assert "300 tokens from 20," in capsys.readouterr().out
    for again in (words, ["tokenizer", "add", out, "<|x|>", "-o", out]):
        with pytest.raises(ConfigError, match="already"):
            run_verb(again)
    run_verb(["tokenizer", "add", out, "<|x|>", "-o", str(tmp_path / "two")])
    said = capsys.readouterr().out
    assert "300  <|x|>" in said
    assert "320 for a multiple of 64" in " ".join(said.split())
    assert Tokenizer.load(tmp_path / "two").grew_from(Tokenizer.load(out))
