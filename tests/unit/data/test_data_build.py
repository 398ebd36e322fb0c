"""Building: deterministic, restartable at any instant, honest about what it could not use."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foundling.config.errors import DataError, RunError
from foundling.config.manifest import Manifest
from foundling.data import DataSet, Row, build, held_out, open_source, training_texts
from foundling.data import spool as spool_module
from foundling.data.build import WORK_FOLDER
from foundling.runtime.files import sha256_file
from foundling.runtime.lock import RunLock
from foundling.tokenizer import Tokenizer, train_tokenizer

WORDS = ("the", "mill", "baker", "goat", "well", "river", "stone", "bread", "letter", "old")


def text(number: int) -> str:
    rng = random.Random(number)
    return " ".join(rng.choices(WORDS, k=rng.randint(3, 40))) + f" {number}"


def rows(count: int = 400) -> list[Row]:
    return [Row(text=text(n), source="t", where=str(n), kind=f"k{n % 3}") for n in range(count)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer((text(n) for n in range(200)), 300)


def make(source: Iterable[Row], tokenizer: Tokenizer, folder: Path, **options: object) -> Manifest:
    fields: dict[str, object] = {
        "name": "t",
        "kind": "text",
        "shard_tokens": 2000,
        "val_share": 0.1,
        "recipe": {"rows": "test"},
    }
    return build(source, tokenizer, folder, **{**fields, **options})  # type: ignore[arg-type]


def files(folder: Path) -> dict[str, str]:
    """Checksum of every file."""
    return {
        str(path.relative_to(folder)): sha256_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def documents(data: DataSet, tokenizer: Tokenizer) -> list[str]:
    found = []
    for number in range(len(data.shards)):
        shard = data.shard(number)
        for start, stop in zip(shard.offsets[:-1], shard.offsets[1:], strict=True):
            found.append(tokenizer.decode(shard.tokens[start:stop].tolist()))
    return found


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


def test_building_again_returns_the_same_or_refuses(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(rows(), tokenizer, tmp_path / "one")
    monkeypatch.setattr(spool_module, "PART_ROWS", 7)
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
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
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
    manifest = make(mixed, tokenizer, tmp_path / "d")
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
    assert manifest.recipe["result"] == {"rows": 58, "quarantined": 8}
    assert sum(info.documents for info in (*manifest.train, *manifest.val)) == 50


def test_nothing_usable_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no usable row for training \(8 rows, 8 in quarantine"):
        make(BAD, tokenizer, tmp_path / "bad")
    with pytest.raises(DataError, match=r"no usable row for training \(0 rows"):
        make([], tokenizer, tmp_path / "none")


def test_max_tokens_stops_after_the_row_that_reaches_it(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "PART_ROWS", 16)

    def endless() -> Iterable[Row]:
        number = 0
        while True:
            yield Row(text=text(number), split="val" if number % 10 == 9 else "train")
            yield Row(text="")
            number += 1

    manifest = make(endless(), tokenizer, tmp_path / "d", max_tokens=3000)
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
    bad: list[object] = [
        None,
        [],
        "hello",
        CHAT[:1],
        [{"role": "robot", "content": "x"}],
        [{"role": "assistant", "content": 4}],
        [*CHAT, {"role": "assistant", "content": "\x00"}],
        [3],
    ]
    good = [Row(messages=CHAT, split="train"), Row(messages=CHAT * 2, split="val")]
    source = [*good, *(Row(messages=m) for m in bad)]  # type: ignore[arg-type]
    manifest = make(source, tokenizer, tmp_path / "d", kind="chat")
    assert manifest.recipe["result"]["quarantined"] == len(bad)
    data = DataSet(tmp_path / "d")
    rendered = tokenizer.render(CHAT)
    shard = data.shard(0)
    assert shard.tokens.tolist() == rendered.ids
    assert shard.mask is not None
    assert shard.mask.tolist() == rendered.mask
    assert manifest.train[0].targets == sum(rendered.mask)
    (document,) = held_out(data)
    assert document.text_bytes == 2 * len("the old baker")
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


CHILD = """
    import os, signal, sys
    sys.path.insert(0, sys.argv[1])
    import foundling.data.spool as spool
    from foundling.tokenizer import Tokenizer
    from test_data_build import make, rows
    spool.PART_ROWS = 60
    countdown, after = int(sys.argv[4]), sys.argv[5] == "after"
    replace = os.replace
    def counting(*paths):
        global countdown
        countdown -= 1
        if countdown == 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*paths)
        if countdown == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    os.replace = counting
    tokenizer = Tokenizer.load(sys.argv[2])
    print("go", flush=True)
    from pathlib import Path
    make(rows(), tokenizer, Path(sys.argv[3]))
"""


def child(tokenizer: Path, folder: Path, kill_at: int, when: str) -> subprocess.Popen[str]:
    code = textwrap.dedent(CHILD)
    here = str(Path(__file__).parent)
    arguments = [here, str(tokenizer), str(folder), str(kill_at), when]
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True
    )


def test_a_build_killed_at_any_moment_ends_with_the_same_bytes(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokenizer.save(tmp_path / "tokenizer")
    make(rows(), tokenizer, tmp_path / "whole")
    wanted = files(tmp_path / "whole")
    rng = random.Random(4)
    # A build of these rows renames some 30 files; each restart repeats a few of the renames.
    moments = [(rng.randint(1, 24), rng.choice(["before", "after"])) for _ in range(3)]
    for number, (kill_at, when) in enumerate(moments):
        folder = tmp_path / f"killed{number}"
        for moment in (kill_at, rng.randint(1, 12)):
            process = child(tmp_path / "tokenizer", folder, moment, when)
            process.communicate(timeout=60)
            assert process.returncode == -signal.SIGKILL
            assert not (folder / "manifest.json").exists()
        make(rows(), tokenizer, folder)
        assert files(folder) == wanted
    folder = tmp_path / "any instant"
    for _ in range(2):
        process = child(tmp_path / "tokenizer", folder, 0, "never")
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(rng.random() * 0.1)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    make(rows(), tokenizer, folder)
    assert files(folder) == wanted


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


def test_files_are_read_in_order_with_their_places(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n\n\n\nthree \xff\n")
    lines = ['{"text": "four"}', "{broken", "", "[1]", '{"text": 5}', '{"other": 1}']
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    pq.write_table(pa.table({"text": ["six", None], "n": [1, 2]}), tmp_path / "c.parquet")
    (tmp_path / "ignored.md").write_text("no")
    source = open_source(str(tmp_path))
    assert [(row.where, row.text, row.problem) for row in source] == [
        ("a.txt:1", "one\ntwo", None),
        ("a.txt:6", "three \udcff", None),
        ("b.jsonl:1", "four", None),
        ("b.jsonl:2", None, "neither text nor messages"),
        ("b.jsonl:4", None, "neither text nor messages"),
        ("b.jsonl:5", 5, None),
        ("b.jsonl:6", None, "neither text nor messages"),
        ("c.parquet:0", "six", None),
        ("c.parquet:1", None, None),
    ]
    assert source.kind == "text"
    assert len(list(open_source(str(tmp_path), documents=3))) == 3
    before = source.recipe
    (tmp_path / "a.txt").write_text("changed")
    assert open_source(str(tmp_path)).recipe != before


def test_chat_files_are_known_by_their_messages(tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    pq.write_table(pa.table({"messages": [CHAT, CHAT]}), tmp_path / "chat.parquet")
    for name, count in (("chat.jsonl", 1), ("chat.parquet", 2)):
        source = open_source(str(tmp_path / name))
        assert source.kind == "chat"
        assert [row.messages for row in source] == [CHAT] * count


@pytest.mark.parametrize("spec", ["nowhere", "hamlet:poems", "notes.md"])
def test_what_is_no_source_is_refused(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.md").write_text("x")
    with pytest.raises(DataError, match=f"{spec} is no source"):
        open_source(spec)


def test_damaged_parquet_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(DataError, match=r"bad\.parquet cannot be read"):
        list(open_source(str(tmp_path / "bad.parquet")))
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "other.parquet")
    with pytest.raises(DataError, match="neither a `text` nor a `messages` column"):
        list(open_source(str(tmp_path / "other.parquet")))


def test_a_tokenizer_learns_from_sources_in_turn_and_never_from_val(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "a{n}"}}\n' for n in range(3)))
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": CHAT}) + '\n{"text": ""}\n')
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    texts = list(training_texts(paths, max_bytes=10**6))
    assert texts == ["a0", "who bakes bread", "the old baker", "a1", "a2"]
    assert list(training_texts(paths, max_bytes=3)) == ["a0", "who bakes bread", "the old baker"]
    held = {row.text for row in open_source("hamlet", documents=200) if row.split == "val"}
    learned = list(training_texts(["hamlet"], max_bytes=40_000))
    assert len(held) > 2
    assert not held & set(learned)
