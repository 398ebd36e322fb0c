"""Judge damaged files in a process of its own, because Arrow may end the process with a signal.

    python damage_child.py HOME < names of cases, a JSON list

Each case prints a line when it begins and one when it ends; a case that only began ended the
process. HOME was made by `make_home` and is not changed.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from damage import Case, cases, source_files, texts

from foundling.config.data import packing_spec_of
from foundling.config.data_manifest import Manifest, ShardInfo
from foundling.config.errors import UserError
from foundling.data.dataset import DataSet
from foundling.data.open_source import open_source
from foundling.data.readers.source import Row, is_held_out, unusable
from foundling.data.shard import Shard, write_shard
from foundling.data.verify import verify
from foundling.runtime.files import sha256_file
from foundling.tokenizer.bpe_trainer import train_tokenizer
from foundling.tokenizer.tokenizer import Tokenizer

SEQ_LEN = 64
TRUNCATED = ("cut", "half", "last byte lost")
NO_FILE = ("other type", "random", "garbage after", "empty", "renamed")
NOTICED = {
    "text": ("zeros", "random", "garbage after", "empty"),
    "json": ("zeros", "random", "garbage after", "empty", *TRUNCATED),
    "table": (*TRUNCATED, *NO_FILE),
    "zst": (*TRUNCATED, *NO_FILE),
}
"""Damage that a reader must notice by itself; of a packed file with a checksum, all of it. The rest
changes one valid file into another, which only its checksum in the manifest can tell."""


# Making what is damaged


def make_home(home: Path) -> None:
    """A data set of texts and one of chats, built by hand, and the files they are built from."""
    tokenizer = train_tokenizer(texts(), 300)
    for name, content in source_files().items():
        (home / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (home / "files" / name).write_bytes(content)
    for kind, file in (("text", "pages.jsonl"), ("chat", "chats.jsonl")):
        make_set(home / kind, kind, list(open_source(str(home / "files" / file))), tokenizer)
    data = DataSet(home / "text")
    data.size(packing_spec_of(SEQ_LEN, "bestfit"))  # leaves the caches beside the shards


def make_set(folder: Path, kind: str, rows: list[Row], tokenizer: Tokenizer) -> None:
    """Shards and manifest of these rows; two train shards would test nothing more."""
    infos: dict[str, tuple[ShardInfo, ...]] = {}
    for split in ("train", "val"):
        chosen = [row for row in rows if is_held_out(row, 0.2) == (split == "val")]
        assert chosen
        shard = _shard(kind, chosen, tokenizer)
        path = folder / split / "shard-00000.arrow"
        path.parent.mkdir(parents=True)
        write_shard(path, shard)
        infos[split] = (
            ShardInfo(
                name=f"{split}/{path.name}",
                documents=len(shard),
                tokens=len(shard.tokens),
                targets=shard.targets,
                text_bytes=int(shard.text_bytes.sum()),
                file_bytes=path.stat().st_size,
                sha256=sha256_file(path),
            ),
        )
    tokenizer.save(folder / "tokenizer")
    _manifest(kind, tokenizer, infos, len(rows)).save(folder)


def _manifest(
    kind: Any, tokenizer: Tokenizer, infos: dict[str, tuple[ShardInfo, ...]], rows: int
) -> Manifest:
    return Manifest(
        name=kind,
        kind=kind,
        tokenizer=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        token_dtype="uint16",
        recipe={"build": {"val_share": 0.2}, "result": {"rows": rows}},
        **infos,
    )


def _shard(kind: str, rows: list[Row], tokenizer: Tokenizer) -> Shard:
    talks = [tokenizer.render(row.messages or ()) for row in rows] if kind == "chat" else []
    ids = [talk.ids for talk in talks] or [tokenizer.document(row.text or "") for row in rows]
    said = [row.text if row.text is not None else _answer(row) for row in rows]
    return Shard(
        offsets=np.cumsum([0, *map(len, ids)]).astype(np.int64),
        tokens=np.concatenate([np.array(one, np.uint16) for one in ids]),
        mask=np.concatenate([np.array(t.mask, np.uint8) for t in talks]) if talks else None,
        text_bytes=np.array([len(text.encode()) for text in said], np.int64),
        kind_codes=np.zeros(len(rows), np.int32),
        kind_names=(kind,),
        floor_bits=np.full(len(rows), np.nan),
    )


def _answer(row: Row) -> str:
    messages: Any = row.messages
    return "".join(m["content"] for m in messages if m["role"] == "assistant")


# Judging


def one_sentence(error: UserError) -> str:
    text = str(error)
    is_one = "\n" not in text and text.endswith(".") and 20 < len(text) < 700
    assert is_one, repr(text)
    return text


def refusal(attempt: Callable[[], object]) -> str | None:
    """The one sentence that an attempt is refused with; None if it is not."""
    try:
        attempt()
    except UserError as error:
        return one_sentence(error)
    return None


def judge_source(case: Case, home: Path, work: Path) -> str:
    """A damaged source is refused or its bad rows are; and never taken for the old one."""
    whole, _, name = case.target.partition(" AS ")
    name = name or whole
    content = (home / "files" / whole).read_bytes()
    path = work / name
    path.write_bytes(content if case.damage == "renamed" else case.hurt(content))
    before = rows_of(home / "files" / whole)
    outcome, now = "read", []
    try:
        now = rows_of(path)
        chat = any(row.messages is not None for row in now)
        bad = [reason for row in now if (reason := unusable(row, chat))]
        outcome = "quarantined" if bad or not now else "read"
    except UserError as error:
        one_sentence(error)
        outcome = "refused"
    if outcome == "read":
        outcome = "no effect"
    if outcome == "no effect" and content_of(now) != content_of(before):
        assert case.damage not in must_notice(name), f"{case.damage} of {name} was read in silence"
        outcome = "only its checksum tells"
    if case.damage != "renamed":
        told = told_apart(home, work, "chat" if "chats" in whole else "text", whole, path)
        assert told, "verify did not notice"
    return outcome


def must_notice(name: str) -> tuple[str, ...]:
    suffix = name.rpartition(".")[2]
    if suffix in ("gz", "xz", "bz2"):
        return ("flip", "scatter", "end scatter", "zeros", "lost", *TRUNCATED, *NO_FILE)
    families = {"json": "json", "parquet": "table", "arrow": "table", "zst": "zst"}
    return NOTICED[families.get(suffix, "text")]


def rows_of(path: Path) -> list[Row]:
    return list(open_source(str(path)))


def content_of(rows: list[Row]) -> list[object]:
    return [row.text if row.messages is None else repr(row.messages) for row in rows]


def told_apart(home: Path, work: Path, kind: str, name: str, damaged: Path) -> bool:
    """Whether `data verify --source` knows that this is not the file of the build."""
    folder = work / "set"
    shutil.copytree(home / kind, folder)
    manifest = Manifest.load(folder)
    recipe = json.loads(json.dumps(open_source(str(home / "files" / name)).recipe))
    replace(manifest, recipe={**manifest.recipe, "source": recipe}).save(folder)
    whole = verify(folder, specs=[str(home / "files" / name)])
    assert not whole.wrong, whole.wrong
    found = verify(folder, specs=[str(damaged)])
    return refusal(found.refuse) is not None


def judge_built(case: Case, home: Path, work: Path) -> str:
    """A damaged data set is refused by training at its start and by verify, or nothing is lost."""
    folder = work / "set"
    shutil.copytree(home / "text", folder)
    path = damaged_file(folder, case.target)
    path.write_bytes(case.hurt(path.read_bytes()))
    before = Manifest.load(home / "text")

    def start() -> None:
        tokenizer = Tokenizer.load(folder / "tokenizer")
        data = DataSet(folder, tokenizer=tokenizer.fingerprint)
        data.verify()
        assert data.digest == before.digest, "another manifest was believed"
        assert same_rows(data, DataSet(home / "text")), "other rows than before"

    told = refusal(start)
    by_verify = refusal(lambda: verify(folder).refuse())
    if case.target in ("PLAN", "NOTE"):
        assert by_verify is None, by_verify
        return "made again" if told is None else "refused"
    assert (told is None) == (by_verify is None), (told, by_verify)
    if told is None:
        assert "shard" not in case.target, "a damaged shard was believed"
        return "no effect"
    read_anyway(folder)
    return "refused"


def damaged_file(folder: Path, target: str) -> Path:
    if target == "PLAN":
        return next((folder / "train").glob("*.plan"))
    if target == "NOTE":
        return next(folder.glob("rows-*.json"))
    return folder / target


def same_rows(data: DataSet, other: DataSet) -> bool:
    for packing in ("bestfit", "concat"):
        spec = packing_spec_of(SEQ_LEN, packing)
        if data.size(spec) != other.size(spec):
            return False
        for unit in range(data.size(spec).units):
            one, two = data.unit(unit, spec), other.unit(unit, spec)
            if not (one.inputs == two.inputs).all() or not (one.targets == two.targets).all():
                return False
    return True


def read_anyway(folder: Path) -> None:
    """Somebody who does not verify must not lose the process either."""
    try:
        data = DataSet(folder)
        spec = packing_spec_of(SEQ_LEN, "bestfit")
        for unit in range(data.size(spec).units):
            data.unit(unit, spec)
    except UserError as error:
        one_sentence(error)


def main(home: Path, names: list[str]) -> None:
    known = {case.name: case for case in cases()}
    for name in names:
        case = known[name]
        print(json.dumps({"begin": name}), flush=True)
        judge = judge_source if case.target.split(" AS ")[0] in source_files() else judge_built
        with tempfile.TemporaryDirectory() as work:
            try:
                result = {"end": name, "outcome": judge(case, home, Path(work))}
            except Exception as error:  # a traceback is what must never happen
                result = {"end": name, "failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.load(sys.stdin))
