"""Building: every row once, in one split, shuffled; honest about what it could not use."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from build_samples import documents, files, learn, make, rows, text
from tokenizers import Tokenizer as Engine
from tokenizers import models, pre_tokenizers

from foundling.cli.main import run_verb
from foundling.config.errors import ConfigError, DataError, RunError
from foundling.data.build import encode
from foundling.data.build.build import WORK_FOLDER, build
from foundling.data.dataset import DataSet, held_out
from foundling.data.open_source import open_source, training_texts
from foundling.data.readers.source import Row
from foundling.runtime.lock import RunLock
from foundling.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return learn()


def test_every_row_is_in_exactly_one_split_and_shuffled(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    manifest = make(rows(), tokenizer, tmp_path / "d")
    train = DataSet(tmp_path / "d", tokenizer=tokenizer.fingerprint)
    train.verify()
    val = DataSet(tmp_path / "d", split="val")
    found = documents(train, tokenizer), documents(val, tokenizer)
    wanted = [f"<|bos|>{row.text}<|eos|>" for row in rows()]
    assert Counter(found[0] + found[1]) == Counter(wanted)
    assert 20 <= len(found[1]) <= 60
    assert found[0] != [document for document in wanted if document in set(found[0])]
    assert len(manifest.train) > 3
    assert all(info.tokens <= 2000 for info in manifest.train)
    for info, number in zip(manifest.train, range(99), strict=False):
        shard = train.shard(number)
        assert (info.documents, info.tokens) == (len(shard), len(shard.tokens))
        assert info.targets == info.tokens - info.documents
        assert shard.tokens.dtype == np.uint16
    assert sum(i.text_bytes for i in (*manifest.train, *manifest.val)) == sum(
        len((row.text or "").encode()) for row in rows()
    )
    assert sorted(files(tmp_path / "d")) == sorted(
        [
            "manifest.json",
            "quarantine.jsonl",
            "tokenizer/tokenizer.json",
            "tokenizer/tokenizer_config.json",
            *(info.name for info in (*manifest.train, *manifest.val)),
        ]
    )
    assert Tokenizer.load(tmp_path / "d/tokenizer").fingerprint == tokenizer.fingerprint


def test_the_split_of_a_text_never_changes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    make(rows(), tokenizer, tmp_path / "one")
    make(list(reversed(rows(600))), tokenizer, tmp_path / "two", seed=9, shard_tokens=500)
    one, two = (
        set(documents(DataSet(tmp_path / name, split="val"), tokenizer)) for name in ("one", "two")
    )
    known = {f"<|bos|>{row.text}<|eos|>" for row in rows()}
    assert one == two & known


def test_a_part_of_which_both_encoders_make_other_ids_stops_the_build(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = learn()
    assert other.fast
    monkeypatch.setattr(other._quick[0], "_ids", tokenizer._quick[0]._ids[::-1])  # type: ignore[union-attr]
    with pytest.raises(DataError, match="differently; install the versions"):
        make(rows(), other, tmp_path / "d")
    assert not (tmp_path / "d" / "manifest.json").exists()


def test_building_again_returns_the_same_or_refuses(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(rows(), tokenizer, tmp_path / "one")
    monkeypatch.setattr(encode, "PART_ROWS", 7)
    make(rows(), tokenizer, tmp_path / "two")
    assert files(tmp_path / "one") == files(tmp_path / "two")

    def never() -> Iterable[Row]:
        raise AssertionError("read again")
        yield

    assert make(never(), tokenizer, tmp_path / "one") == first
    with pytest.raises(DataError, match="already holds the data set 't'"):
        make(rows(), tokenizer, tmp_path / "one", seed=2)
    with pytest.raises(DataError, match="already holds the data set 't'"):
        make(rows(), tokenizer, tmp_path / "one", recipe={"rows": "others"})


def test_a_folder_that_is_not_ours_is_left_alone(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train/mine.txt").write_text("precious")
    with pytest.raises(DataError, match="is not empty and holds no data set"):
        make(rows(), tokenizer, tmp_path)
    assert (tmp_path / "train/mine.txt").read_text() == "precious"


def test_an_unfinished_build_of_something_else_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "PART_ROWS", 3)  # so that parts of the rows below are there
    with pytest.raises(ZeroDivisionError):
        make((row for n in (2, 1, 0) for row in rows(9 // n)), tokenizer, tmp_path / "d")
    with pytest.raises(DataError, match="unfinished build of something else"):
        make(rows(), tokenizer, tmp_path / "d", seed=5)
    with RunLock(tmp_path / "d" / WORK_FOLDER), pytest.raises(RunError, match="in use"):
        make(rows(), tokenizer, tmp_path / "d")
    make(rows(), tokenizer, tmp_path / "d")
    make(rows(), tokenizer, tmp_path / "whole")
    assert files(tmp_path / "d") == files(tmp_path / "whole")


BAD = [
    Row(text="", where="a"),
    Row(text=" \n", where="b"),
    Row(text=17, where="c"),  # type: ignore[arg-type]
    Row(text="a\ud800b", where="d"),
    Row(text="a\x00b", where="e"),
    Row(text=None, where="f"),
    Row(text="fine", split="test", where="g"),
    Row(problem="not JSON", where="h"),
]


def test_unusable_rows_go_to_quarantine_with_place_and_reason(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    good = rows(50)
    mixed = [*good[:10], *BAD, *good[10:]]
    manifest = make(mixed, tokenizer, tmp_path / "d", max_bad=0.2)
    lines = (tmp_path / "d/quarantine.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert [entry["where"] for entry in entries] == list("abcdefgh")
    assert [entry["row"] for entry in entries] == list(range(10, 18))
    assert [entry["reason"] for entry in entries] == [
        "empty",
        "empty",
        "text is int",
        "lone surrogate",
        "NUL",
        "no text",
        "split is 'test'",
        "not JSON",
    ]
    counts = {"rows": 58, "quarantined": 8, "duplicates": 0, "overlapping": 0}
    assert manifest.recipe["result"] == counts
    assert sum(info.documents for info in (*manifest.train, *manifest.val)) == 50


def test_nothing_usable_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no usable row for training \(8 rows, 8 in quarantine"):
        make(BAD, tokenizer, tmp_path / "bad")
    with pytest.raises(DataError, match=r"1 in quarantine, most lately because of 'NUL' at x:3\)"):
        make([Row(text="a\x00", where="x:3")], tokenizer, tmp_path / "bad")
    with pytest.raises(DataError, match=r"no usable row for training \(0 rows"):
        make([], tokenizer, tmp_path / "none")
    with pytest.raises(DataError, match=r"50 rows, 0 in .*; --val-share 0.999 holds out the rest"):
        make(rows(50), tokenizer, tmp_path / "held", val_share=0.999)
    assert not list(tmp_path.iterdir()), "the same folder may be tried with another source"


def test_a_tokenizer_without_tokens_for_the_text_is_refused_or_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """WordLevel without a rule that splits words: every text of two words is its unknown token."""
    engine = Engine(models.WordLevel({"[UNK]": 0, "mill": 1}, unk_token="[UNK]"))
    (tmp_path / "a.txt").write_text("\n\n".join(text(n) for n in range(40)))
    (tmp_path / "b.txt").write_text("\n\n".join(["mill"] * 30 + ["goat"]))
    for splits in (False, True):
        if splits:
            engine.pre_tokenizer = pre_tokenizers.Whitespace()
        engine.save(str(tmp_path / "tokenizer.json"))
        words = ["--tokenizer", str(tmp_path), "--keep-duplicates", "--val-share", "0"]
        with pytest.raises(DataError, match="no token for most of the text: "):
            run_verb(
                [
                    "data",
                    "build",
                    str(tmp_path / "a.txt"),
                    "-o",
                    str(tmp_path / f"a{splits}"),
                    *words,
                ]
            )
    run_verb(["data", "build", str(tmp_path / "b.txt"), "-o", str(tmp_path / "b"), *words])
    assert "1 tokens of" in capsys.readouterr().err


def test_a_file_in_the_way_and_a_data_set_as_source_are_named(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "in"):
        with pytest.raises(ConfigError, match="file is a file and no folder"):
            make([Row(text="a")], tokenizer, folder)
    make(rows(50), tokenizer, tmp_path / "d")
    with pytest.raises(DataError, match="built already; give what it was made of"):
        open_source(str(tmp_path / "d"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="is a folder without a file that can be read"):
        open_source(str(tmp_path / "empty"))


def test_max_tokens_stops_after_the_row_that_reaches_it(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "PART_ROWS", 16)

    def endless() -> Iterable[Row]:
        number = 0
        while True:
            yield Row(text=text(number), split="val" if number % 10 == 9 else "train")
            yield Row(text="")
            number += 1

    manifest = make(endless(), tokenizer, tmp_path / "d", max_tokens=3000, max_bad=0.6)
    longest = max(len(tokenizer.document(text(n))) for n in range(400))
    assert 3000 <= manifest.train_tokens < 3000 + longest
    assert manifest.recipe["result"]["rows"] < 400
    train_rows = sum(info.documents for info in manifest.train)
    lengths = [len(tokenizer.document(text(n))) for n in range(400) if n % 10 != 9]
    assert sum(lengths[: train_rows - 1]) < 3000 <= sum(lengths[:train_rows])


CHAT = [
    {"role": "user", "content": "who bakes bread"},
    {"role": "assistant", "content": "the old baker"},
]


def test_chats_keep_their_mask_and_bad_ones_are_quarantined(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    unlearned = {**CHAT[1], "weight": 0}
    bad: list[object] = [
        None,
        [],
        "hello",
        CHAT[:1],
        [CHAT[0], unlearned],
        [{"role": "robot", "content": "x"}],
        [{"role": "assistant", "content": 4}],
        [*CHAT, {"role": "assistant", "content": "\x00"}],
        [3],
    ]
    twice = [CHAT[0], unlearned, *CHAT]
    good = [Row(messages=CHAT, split="train"), Row(messages=twice, split="val")]
    source = [*good, *(Row(messages=m) for m in bad)]  # type: ignore[arg-type]
    manifest = make(source, tokenizer, tmp_path / "d", kind="chat", max_bad=0.9)
    assert manifest.recipe["result"]["quarantined"] == len(bad)
    data = DataSet(tmp_path / "d")
    rendered = tokenizer.render(CHAT)
    shard = data.shard(0)
    assert shard.tokens.tolist() == rendered.ids
    assert shard.mask is not None
    assert shard.mask.tolist() == rendered.mask
    assert manifest.train[0].targets == sum(rendered.mask)
    (document,) = held_out(data)
    assert document.text_bytes == len("the old baker")
    assert document.mask is not None
    assert sum(document.mask.tolist()) == sum(rendered.mask), "the other has the weight 0"
    row = data.row(0, 64, "bestfit")
    spoken = row.targets[row.targets >= 0].tolist()
    assert tokenizer.decode(spoken) == "the old baker<|end|>"


def test_floors_kinds_and_a_large_vocabulary_are_kept(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "vocab_size", (1 << 16) + 1)
    source = [
        Row(text=text(n), kind=f"k{n % 3}", floor_bits=None if n % 2 else n / 7, split="val")
        for n in range(20)
    ]
    manifest = make([*source, Row(text="x", split="train")], tokenizer, tmp_path / "d")
    assert manifest.token_dtype == "uint32"
    known = {tuple(tokenizer.document(row.text or "")): row for row in source}
    for document in held_out(DataSet(tmp_path / "d")):
        row = known.pop(tuple(document.tokens.tolist()))
        assert (document.kind, document.floor_bits) == (row.kind, row.floor_bits)
        assert document.tokens.dtype == np.uint32
    assert not known


def test_a_kill_after_the_manifest_leaves_a_finished_build(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    make(rows(), tokenizer, tmp_path / "d")
    wanted = files(tmp_path / "d")
    (tmp_path / "d" / WORK_FOLDER).mkdir()
    (tmp_path / "d" / WORK_FOLDER / "part-000000.arrow").write_text("left over")
    make(rows(), tokenizer, tmp_path / "d")
    assert files(tmp_path / "d") == wanted


def test_hamlet_gives_documents_with_floors_and_its_own_val(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    source = open_source("hamlet", seed=3, documents=200, val_share=0.1)
    assert list(source) == list(source)
    splits = Counter(row.split for row in source)
    assert splits == {"train": 200, "val": 20}
    first = list(source)[:12]
    assert any(row.split == "val" for row in first)
    manifest = build(source, tokenizer, tmp_path / "d", name="h", kind=source.kind)
    assert manifest.recipe["source"]["seed"] == 3
    assert sum(info.documents for info in manifest.train) == 200
    for document in held_out(DataSet(tmp_path / "d")):
        assert document.floor_bits is not None
        assert 0 < document.floor_bits / document.text_bytes < 2
    endless = open_source("hamlet", seed=3, val_share=0.05)
    amount = build(
        endless, tokenizer, tmp_path / "e", name="h", kind="text", max_tokens=5000
    ).train_tokens
    assert 5000 <= amount < 7000


def test_hamlet_chats(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = open_source("hamlet:chat", seed=3, documents=60, val_share=0.1)
    manifest = build(source, tokenizer, tmp_path / "d", name="h", kind=source.kind)
    assert manifest.kind == "chat"
    assert sum(info.documents for info in manifest.val) == 6
    assert 0 < manifest.train[0].targets < manifest.train[0].tokens


def test_a_tokenizer_learns_from_sources_in_turn_and_never_from_val(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "a{n}"}}\n' for n in range(3)))
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": CHAT}) + '\n{"messages": []}\n')
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    texts = list(training_texts(paths, max_bytes=10**6))
    assert texts == ["a0", "who bakes bread", "the old baker", "a1", "a2"]
    assert list(training_texts(paths, max_bytes=3)) == ["a0", "w"]
    held = {row.text for row in open_source("hamlet", documents=200) if row.split == "val"}
    learned = list(training_texts(["hamlet"], max_bytes=40_000))
    assert len(held) > 2
    assert not held & set(learned)
