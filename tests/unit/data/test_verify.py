"""`data verify`: what is wrong is found and named, what could not be checked is said."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foundling.cli.main import run_verb
from foundling.config.data_manifest import Manifest
from foundling.config.errors import DataError
from foundling.config.run import RunConfig
from foundling.data import shard
from foundling.data.build.build import build
from foundling.data.dataset import DataSet
from foundling.data.open_source import open_source
from foundling.data.readers.source import Row
from foundling.data.shard import Shard, read_shard, write_shard
from foundling.data.verify import verify
from foundling.runtime.files import sha256_file
from foundling.runtime.run_dir import RunDir
from foundling.tokenizer.bpe_trainer import train_tokenizer
from foundling.tokenizer.tokenizer import Tokenizer
from foundling.train.loop import train
from tests.village import Village

SHARD = "train/shard-00000.arrow"
NO_NOTES = shutil.ignore_patterns(shard.NOTE)


@pytest.fixture
def texts(village: Village, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(village.text, tmp_path / "text", ignore=NO_NOTES))


@pytest.fixture
def chats(village: Village, tmp_path: Path) -> Path:
    return Path(shutil.copytree(village.chat, tmp_path / "chat", ignore=NO_NOTES))


def reseal(folder: Path, change: Callable[[Shard], Shard]) -> None:
    """Change a shard and make size, checksum and manifest fit: the work of a careful hand."""
    path = folder / SHARD
    changed = change(read_shard(path))
    changed = replace(changed, tokens=changed.tokens.copy())
    path.unlink()  # never write to a file that is mapped
    write_shard(path, changed)
    manifest = Manifest.load(folder)
    info = replace(manifest.train[0], file_bytes=path.stat().st_size, sha256=sha256_file(path))
    replace(manifest, train=(info, *manifest.train[1:])).save(folder)


def put(array: Any, place: int, value: int) -> Any:
    changed = np.array(array)
    changed[place] = value
    return changed


def flip(path: Path) -> None:
    """One bit among the tokens."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def edit_manifest(folder: Path) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    content["train"][0]["documents"] -= 1
    (folder / "manifest.json").write_text(json.dumps(content))


def truncate(folder: Path) -> None:
    os.truncate(folder / SHARD, (folder / SHARD).stat().st_size - 100)


def other_tokenizer(folder: Path) -> None:
    train_tokenizer(["other words"], 280).save(folder / "tokenizer")


def other_manifest(**changed: Any) -> Callable[[Path], None]:
    return lambda folder: replace(Manifest.load(folder), **changed).save(folder)


def nested_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"train": ' + "[" * 20_000 + "]" * 20_000 + "}")


def put_token(folder: Path) -> None:
    reseal(folder, lambda s: replace(s, tokens=put(s.tokens, 9, 65535)))


HANDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "an edited manifest": (edit_manifest, "was changed after it was written"),
    "a truncated shard": (truncate, "bytes where the manifest says"),
    "a flipped byte": (lambda folder: flip(folder / SHARD), "is damaged"),
    "another tokenizer": (other_tokenizer, "tokenizer"),
    "a manifest nested without end": (nested_manifest, "cannot be read"),
    "a token beyond the vocabulary": (put_token, "token 9 is 65535"),
    "a small vocabulary": (other_manifest(vocab_size=10), "the manifest says 10"),
    "tokens of another type": (other_manifest(token_dtype="uint32"), "uint16 tokens, not uint32"),
    "a missing shard": (lambda folder: (folder / SHARD).unlink(), "is missing"),
}


@pytest.mark.parametrize("what", HANDS)
def test_each_is_refused_with_one_sentence_by_training_and_by_verify(
    what: str, texts: Path, tiny: RunConfig, tmp_path: Path
) -> None:
    harm, words = HANDS[what]
    harm(texts)
    config = tiny.replace(data={"sources": {str(texts): 1.0}})
    for attempt in (
        lambda: train(config, RunDir(tmp_path / "run")),
        lambda: run_verb(["data", "verify", str(texts)]),
    ):
        with pytest.raises(DataError, match=words) as caught:
            attempt()
        assert str(texts) in str(caught.value)
        assert "\n" not in str(caught.value)
        assert str(caught.value).endswith(".")
    assert not (tmp_path / "run" / "run.json").exists()


def test_what_is_whole_passes_and_its_source_is_looked_at(village: Village) -> None:
    for folder, name in ((village.text, "hamlet"), (village.chat, "hamlet:chat")):
        found = verify(folder)
        assert not found.wrong
        assert not found.unchecked
        assert f"the source ({name}) is what the build read" in found.checked[-1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: replace(s, tokens=put(s.tokens, 9, 65535)), "token 9 is 65535"),
        (lambda s: replace(s, tokens=put(s.tokens, 0, 7)), "does not begin with BOS"),
        (lambda s: replace(s, tokens=put(s.tokens, -1, 7)), "does not end with its end marker"),
        (lambda s: replace(s, text_bytes=put(s.text_bytes, 3, 9999)), "bytes of text where"),
        (lambda s: replace(s, text_bytes=put(s.text_bytes, 3, -5)), "fewer than no bytes"),
        (lambda s: replace(s, tokens=s.tokens.astype(np.uint32)), "uint32 tokens"),
        (lambda s: replace(s, offsets=put(s.offsets, 1, 0)), "is empty"),
        (lambda s: replace(s, mask=np.zeros(len(s.tokens), np.uint8)), "not of the kind text"),
    ],
)
def test_what_a_careful_hand_changed_is_found(
    texts: Path, change: Callable[[Shard], Shard], words: str
) -> None:
    reseal(texts, change)
    found = verify(texts)
    assert any(words in sentence for sentence in found.wrong), found.wrong
    with pytest.raises(DataError):
        found.refuse()


def test_a_mask_that_counts_too_much_is_found(chats: Path) -> None:
    reseal(chats, lambda s: replace(s, mask=put(s.mask, 0, 1)))
    assert any("first token" in sentence for sentence in verify(chats).wrong)


def test_the_first_finding_is_the_sentence_and_the_rest_is_listed(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(texts / SHARD)
    flip(texts / "val" / "shard-00000.arrow")
    (texts / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"tokenizer.*\(2 more findings listed above\)\.$"):
        run_verb(["data", "verify", str(texts)])
    listed = capsys.readouterr().out
    assert listed.count("WRONG") == 3
    assert "not checked  the source, because" in listed
    with pytest.raises(DataError):
        run_verb(["data", "verify", str(texts), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (told["whole"], len(told["wrong"])) == (False, 3)


def test_a_manifest_that_names_other_files_is_refused(texts: Path) -> None:
    manifest = Manifest.load(texts)
    with pytest.raises(DataError, match="outside of its folder"):
        replace(manifest.val[0], name="../../etc/passwd")
    replace(manifest, val=(replace(manifest.val[0], name=SHARD),)).save(texts)
    assert "twice" in verify(texts).wrong[0]


def write_rows(path: Path, name: str, count: int) -> None:
    lines = [json.dumps({"text": f"{name} says {n} " + "word " * (n % 31)}) for n in range(count)]
    path.write_text("\n".join([*lines, '{"text": 3}', lines[0]]) + "\n")


def test_files_are_found_again_wherever_they_lie(
    tmp_path: Path, village: Village, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [str(tmp_path / f"{name}.jsonl") for name in ("one", "two")]
    for spec in specs:
        write_rows(Path(spec), Path(spec).stem, 200)
    tokenizer = Tokenizer.load(village.tokenizer)
    folder = tmp_path / "set"
    sources = [open_source(spec) for spec in specs]
    build(sources, tokenizer, folder, max_bad=0.5)
    found = verify(folder)
    assert not found.wrong
    assert found.unchecked == [
        "the source, because one.jsonl is not here; say with --source where it is"
    ]
    found = verify(folder, specs=specs)
    assert (found.wrong, found.unchecked) == ([], [])
    assert "the source (one.jsonl, two.jsonl) is what the build read" in found.checked[-1]
    assert "--source names 1" in verify(folder, specs=specs[:1]).wrong[0]
    assert "one.jsonl has changed" in verify(folder, specs=specs[::-1]).wrong[0]
    monkeypatch.chdir(tmp_path)
    assert "is what the build read" in verify(folder).checked[-1]  # found by their names
    Path(specs[1]).write_text('{"text": "another file of that name"}')
    assert "two.jsonl is not here" in verify(folder).unchecked[0]
    Path(specs[1]).write_text("not what it was")
    assert "cannot be read again" in verify(folder, specs=specs).wrong[0]


def test_a_followed_build_is_checked_as_far_as_it_has_come(texts: Path) -> None:
    replace(Manifest.load(texts), complete=False).save(texts)
    found = verify(texts)
    assert not found.wrong
    assert found.unchecked == ["the source, because the build has not reached its end"]


def test_rows_without_a_source_are_said_to_be_unchecked(tmp_path: Path, village: Village) -> None:
    rows = [Row(text=f"row {n}", split="train" if n else "val") for n in range(5)]
    tokenizer = Tokenizer.load(village.tokenizer)
    build(rows, tokenizer, tmp_path / "set", name="rows", kind="text")
    shutil.copy(tmp_path / "set" / SHARD, tmp_path / "set" / "train" / "shard-00007.arrow")
    found = verify(tmp_path / "set")
    assert not found.wrong
    assert len(found.unchecked) == 2
    assert "1 shards that the manifest does not name" in found.unchecked


def test_a_resume_hashes_only_what_has_changed(
    texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    hash_file = shard.sha256_file
    monkeypatch.setattr(
        shard, "sha256_file", lambda path: read.append(path.name) or hash_file(path)
    )
    data = DataSet(texts)
    data.verify(changed_only=True)
    assert len(read) == 2  # nobody has looked before
    data.verify(changed_only=True)
    assert len(read) == 2
    data.verify()
    assert len(read) == 4
    flip(texts / SHARD)
    with pytest.raises(DataError, match="is damaged"):
        data.verify(changed_only=True)
    assert len(read) == 5
    (texts / shard.NOTE).write_text("[1")
    flip(texts / SHARD)
    data.verify(changed_only=True)
    assert len(read) == 7


def test_a_folder_that_cannot_be_written_to_is_verified_all_the_same(
    texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, text: str) -> None:
        raise PermissionError(13, "no", str(path))

    monkeypatch.setattr(shard, "write_text_atomic", refuse)
    assert not verify(texts).wrong
    assert not (texts / shard.NOTE).exists()
