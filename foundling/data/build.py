"""Rows to a data set: encode, split, shuffle, write shards, and last of all the manifest.

The same rows give the same bytes. Work in progress lives in `.build` inside the folder; killed at
any instant and started again with the same rows, a build goes on and ends with the same files. A
folder that holds something else is never touched.

    DIR/manifest.json           written last: a folder without it is not a data set
    DIR/train/shard-00000.arrow ...
    DIR/val/shard-00000.arrow ...
    DIR/tokenizer/              what the tokens were made with
    DIR/quarantine.jsonl        rows that could not be used, with place and reason
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from foundling.config.errors import DataError
from foundling.config.manifest import MANIFEST_NAME, Manifest, ShardInfo
from foundling.data.dataset import TOKENIZER_FOLDER, Split
from foundling.data.keyed import permute, round_keys
from foundling.data.rows import Row
from foundling.data.shard import Shard, write_shard
from foundling.data.spool import Encoder, read_part, spool
from foundling.runtime.files import fsync_dir, sha256_file, write_text_atomic
from foundling.runtime.lock import RunLock
from foundling.tokenizer import Tokenizer

WORK_FOLDER = ".build"
QUARANTINE = "quarantine.jsonl"


def build(
    rows: Iterable[Row],
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    name: str,
    kind: Literal["text", "chat"],
    shard_tokens: int = 100_000_000,
    val_share: float = 0.02,
    max_tokens: int | None = None,
    seed: int = 1,
    recipe: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Build a data set, go on with one that was interrupted, or return the finished one.

    `max_tokens` stops after that many tokens for training; `val_share` holds out rows whose source
    does not decide; `recipe` (default: the source's own) says what the rows are, and a folder that
    was begun with another recipe is refused; `progress` is called with rows and tokens so far.
    """
    folder = Path(folder)
    if recipe is None:
        recipe = getattr(rows, "recipe", {})
    settings = {
        "name": name,
        "kind": kind,
        "tokenizer": tokenizer.fingerprint,
        "shard_tokens": shard_tokens,
        "val_share": val_share,
        "max_tokens": max_tokens,
        "seed": seed,
    }
    plan = json.loads(json.dumps({"source": recipe, "build": settings}))
    finished = _finished(folder, plan)
    if finished is not None:
        return finished
    _claim(folder, plan)
    work = folder / WORK_FOLDER
    with RunLock(work):
        dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
        encoder = Encoder(
            tokenizer=tokenizer, chat=kind == "chat", val_share=val_share, dtype=dtype
        )
        parts = spool(rows, encoder, work, max_tokens=max_tokens, progress=progress)
        index = _Index.of(parts)
        train = _write_split(folder, "train", index, seed, shard_tokens)
        val = _write_split(folder, "val", index, seed, shard_tokens)
        if not train:
            raise DataError(
                f"{name} gave no usable row for training ({index.rows} rows,"
                f" {len(index.quarantine)} in quarantine); look at the source."
            )
        _write_notes(folder, tokenizer, index.quarantine)
        result = {"rows": index.rows, "quarantined": len(index.quarantine)}
        manifest = Manifest(
            name=name,
            kind=kind,
            tokenizer=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            token_dtype="uint16" if dtype is np.uint16 else "uint32",
            train=train,
            val=val,
            recipe={**plan, "result": result},
        )
        manifest.save(folder)
        fsync_dir(folder)
        shutil.rmtree(work)
    return manifest


def _finished(folder: Path, plan: dict[str, Any]) -> Manifest | None:
    """The manifest of the same build, if it is there; another build's is refused."""
    if not (folder / MANIFEST_NAME).exists():
        return None
    manifest = Manifest.load(folder)
    if {key: manifest.recipe.get(key) for key in plan} != plan:
        raise DataError(
            f"{folder} already holds the data set {manifest.name!r}, built from something else or"
            " with other settings; choose another folder or remove it."
        )
    shutil.rmtree(folder / WORK_FOLDER, ignore_errors=True)
    return manifest


def _claim(folder: Path, plan: dict[str, Any]) -> None:
    """Make the folder this build's own, or see that it already is."""
    claim = folder / WORK_FOLDER / "plan.json"
    if claim.is_file():
        if json.loads(claim.read_text(encoding="utf-8")) != plan:
            raise DataError(
                f"{folder} holds an unfinished build of something else or with other settings;"
                " choose another folder or remove it."
            )
        return
    # A kill may come before the claim is written: an empty work folder belongs to nobody.
    if folder.is_dir() and any(entry.name != WORK_FOLDER for entry in folder.iterdir()):
        raise DataError(f"{folder} is not empty and holds no data set; choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomic(claim, json.dumps(plan, indent=2) + "\n")


def _write_notes(folder: Path, tokenizer: Tokenizer, quarantine: list[dict[str, Any]]) -> None:
    """The small files, written aside and moved, so that a kill leaves no temporary names."""
    aside = folder / WORK_FOLDER / "aside"
    tokenizer.save(aside / TOKENIZER_FOLDER)
    lines = [json.dumps(entry) + "\n" for entry in quarantine]
    write_text_atomic(aside / QUARANTINE, "".join(lines))
    (folder / TOKENIZER_FOLDER).mkdir(exist_ok=True)
    for file in (aside / TOKENIZER_FOLDER).iterdir():
        os.replace(file, folder / TOKENIZER_FOLDER / file.name)
    os.replace(aside / QUARANTINE, folder / QUARANTINE)


@dataclass(frozen=True)
class _Index:
    """Where every document is, in order of its row: the only thing a build holds in memory."""

    parts: Sequence[Path]
    part: NDArray[np.int32]
    place: NDArray[np.int64]
    """Number of the document within its part."""
    length: NDArray[np.int64]
    held_out: NDArray[np.bool_]
    kinds: tuple[str, ...]
    quarantine: list[dict[str, Any]]
    rows: int

    @classmethod
    def of(cls, paths: Sequence[Path]) -> "_Index":
        columns: list[tuple[NDArray[Any], ...]] = []
        kinds: set[str] = set()
        quarantine: list[dict[str, Any]] = []
        rows = 0
        for number, path in enumerate(paths):
            part = read_part(path)
            size = len(part.documents)
            place = np.arange(size, dtype=np.int64)
            length = np.diff(part.documents.offsets)
            columns.append((np.full(size, number, np.int32), place, length, part.held_out))
            kinds.update(part.documents.kind_names)
            quarantine += part.quarantine
            rows += part.rows
        none = tuple(np.empty(0, dtype) for dtype in (np.int32, np.int64, np.int64, np.bool_))
        part_of, places, lengths, held_out = (
            np.concatenate(arrays) for arrays in zip(none, *columns, strict=True)
        )
        names = tuple(sorted(kinds))
        return cls(paths, part_of, places, lengths, held_out, names, quarantine, rows)


def _write_split(
    folder: Path, split: Split, index: _Index, seed: int, shard_tokens: int
) -> tuple[ShardInfo, ...]:
    """Shuffle the split's documents as a whole and cut them into shards of about one size."""
    chosen = np.flatnonzero(index.held_out == (split == "val"))
    if not len(chosen):
        return ()
    order = permute(
        np.arange(len(chosen), dtype=np.int64), len(chosen), round_keys("build", split, seed)
    )
    chosen = chosen[order]
    total = np.cumsum(index.length[chosen])
    (folder / split).mkdir(exist_ok=True)
    infos: list[ShardInfo] = []
    start = 0
    while start < len(chosen):
        done = int(total[start - 1]) if start else 0
        stop = max(start + 1, int(total.searchsorted(done + shard_tokens, side="right")))
        name = f"{split}/shard-{len(infos):05d}.arrow"
        infos.append(_write(folder, name, _gather(index, chosen[start:stop])))
        start = stop
    return tuple(infos)


def _gather(index: _Index, chosen: NDArray[np.int64]) -> Shard:
    """Copy the chosen documents together, opening one part at a time."""
    offsets = np.concatenate([[0], np.cumsum(index.length[chosen])]).astype(np.int64)
    size = len(chosen)
    tokens: NDArray[Any] | None = None
    mask: NDArray[np.uint8] | None = None
    bytes_, floors = np.empty(size, np.int64), np.empty(size, np.float64)
    codes = np.empty(size, np.int32)
    for number in np.unique(index.part[chosen]).tolist():
        part = read_part(index.parts[number]).documents
        here = np.flatnonzero(index.part[chosen] == number)
        places = index.place[chosen[here]]
        if tokens is None:
            tokens = np.empty(int(offsets[-1]), part.tokens.dtype)
            mask = None if part.mask is None else np.empty(len(tokens), np.uint8)
        for target, place in zip(here.tolist(), places.tolist(), strict=True):
            into = slice(offsets[target], offsets[target + 1])
            out = slice(part.offsets[place], part.offsets[place + 1])
            tokens[into] = part.tokens[out]
            if mask is not None and part.mask is not None:
                mask[into] = part.mask[out]
        bytes_[here], floors[here] = part.text_bytes[places], part.floor_bits[places]
        recode = np.array([index.kinds.index(name) for name in part.kind_names], np.int32)
        codes[here] = recode[part.kind_codes[places]]
    assert tokens is not None
    return Shard(offsets, tokens, mask, bytes_, codes, index.kinds, floors)


def _write(folder: Path, name: str, shard: Shard) -> ShardInfo:
    """Write a shard in the work folder and move it into place, so that no torn name is left."""
    path = folder / name
    temporary = folder / WORK_FOLDER / "shard.arrow"
    write_shard(temporary, shard)
    digest = sha256_file(temporary)
    os.replace(temporary, path)
    fsync_dir(path.parent)
    return ShardInfo(
        name=name,
        documents=len(shard),
        tokens=len(shard.tokens),
        targets=shard.targets,
        text_bytes=int(shard.text_bytes.sum()),
        file_bytes=path.stat().st_size,
        sha256=digest,
    )
