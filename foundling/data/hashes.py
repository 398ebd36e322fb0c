"""Shards against their manifest, on all cores: their checksums, and what is in those that fit.

A first start and `data verify` read everything: a careful hand can make a checksum fit to tokens
that no model has. A resume must not wait for terabytes that were
hashed yesterday, so what was found whole is noted beside the manifest with size and time of change,
and `changed_only` reads again only what differs from the note. The note says nothing about a disk
that decays in silence; that is what `data verify` is for.

Threads and not processes: hashing releases the interpreter's lock.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np

from foundling.config.errors import DataError
from foundling.config.manifest import Manifest, ShardInfo
from foundling.data.shard import Shard, read_shard
from foundling.runtime.files import sha256_file, write_text_atomic
from foundling.tokenizer import Tokenizer

NOTE = ".verified.json"
BLOCK = 1 << 22
"""Tokens or documents looked at together: a shard of any size needs the same memory."""
Progress = Callable[[int], None]
"""Called with the bytes that one more shard had."""
Result = TypeVar("Result")


def all_shards(manifest: Manifest) -> tuple[ShardInfo, ...]:
    """The shards of both splits."""
    return (*manifest.train, *manifest.val)


def wrong_size(folder: Path, info: ShardInfo) -> str | None:
    """What is wrong with a shard at first sight, as a sentence; None if nothing is."""
    path = folder / info.name
    if not path.is_file():
        return f"{path} is missing; copy it back or build the data set again."
    size = path.stat().st_size
    if size != info.file_bytes:
        return (
            f"{path} has {size} bytes where the manifest says {info.file_bytes}; copy it again or"
            " build the data set again."
        )
    return None


def wrong_hash(folder: Path, info: ShardInfo) -> str | None:
    """What is wrong with a shard after reading all of it, as a sentence; None if nothing is."""
    first = wrong_size(folder, info)
    if first is not None:
        return first
    path = folder / info.name
    try:
        digest = sha256_file(path)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror}); copy it again."
    if digest != info.sha256:
        return (
            f"{path} is damaged (its sha256 is not the manifest's); copy it again or build the data"
            " set again."
        )
    return None


def wrong_shard(
    folder: Path, info: ShardInfo, manifest: Manifest, tokenizer: Tokenizer | None
) -> list[str]:
    """What is wrong with a shard, a sentence each. It is opened only if its checksum is right:
    Arrow believes what a file says about itself, and a flipped bit there can end the process."""
    damaged = wrong_hash(folder, info)
    if damaged:
        return [damaged]
    return wrong_content(folder / info.name, info, manifest, tokenizer)


def damage(
    folder: Path,
    manifest: Manifest,
    tokenizer: Path,
    *,
    changed_only: bool = False,
    workers: int = 0,
    progress: Progress | None = None,
) -> list[str]:
    """A sentence for every finding in shards that are not what the manifest says; notes what was
    whole. `tokenizer` is where the data set's own lies; without one, BOS and EOS are unknown."""
    noted = _read_note(folder) if changed_only else {}
    doubtful = [
        info for info in all_shards(manifest) if noted.get(info.name) != _mark(folder, info)
    ]
    if not doubtful:
        return []
    own = own_tokenizer(tokenizer, manifest) if tokenizer.exists() else None
    found = each_of(
        doubtful,
        lambda info: wrong_shard(folder, info, manifest, own),
        workers=workers,
        progress=progress,
    )
    sentences = [sentence for wrong in found for sentence in wrong]
    if not sentences:
        note_whole(folder, manifest)
    return sentences


def each_of(
    infos: Iterable[ShardInfo],
    work: Callable[[ShardInfo], Result],
    *,
    workers: int = 0,
    progress: Progress | None = None,
) -> Iterator[Result]:
    """`work` of every shard, some at a time, in the order of the shards."""
    infos = tuple(infos)
    with ThreadPoolExecutor(workers or min(16, os.cpu_count() or 1)) as pool:
        for info, result in zip(infos, pool.map(work, infos), strict=True):
            if progress is not None:
                progress(info.file_bytes)
            yield result


def note_whole(folder: Path, manifest: Manifest) -> None:
    """Note that every shard was found whole; a folder that cannot be written to goes without."""
    shards = {info.name: _mark(folder, info) for info in all_shards(manifest)}
    with suppress(OSError):
        write_text_atomic(folder / NOTE, json.dumps(shards) + "\n")


def _mark(folder: Path, info: ShardInfo) -> list[object]:
    """What a file would hardly keep if somebody wrote to it; the checksum ties it to the manifest,
    which grows while a build goes on."""
    try:
        stat = (folder / info.name).stat()
    except OSError:
        return []
    return [info.sha256, stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _read_note(folder: Path) -> dict[str, list[object]]:
    try:
        note = json.loads((folder / NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return note if isinstance(note, dict) else {}


def own_tokenizer(path: Path, manifest: Manifest) -> Tokenizer:
    """The data set's own tokenizer, which must be the one that its tokens were made with."""
    tokenizer = Tokenizer.load(path)
    if tokenizer.fingerprint != manifest.tokenizer:
        raise DataError(
            f"{path} has the fingerprint {tokenizer.fingerprint[:12]} and the data set was built"
            f" with {manifest.tokenizer[:12]}; copy the right tokenizer back."
        )
    if tokenizer.vocab_size != manifest.vocab_size:
        raise DataError(
            f"{path} has {tokenizer.vocab_size} tokens and the manifest says"
            f" {manifest.vocab_size}; copy the right tokenizer back."
        )
    return tokenizer


def wrong_content(
    path: Path, info: ShardInfo, manifest: Manifest, tokenizer: Tokenizer | None
) -> list[str]:
    """What is wrong inside a shard whose checksum is right: the build, or somebody's hand."""
    try:
        shard = read_shard(path)
    except DataError as error:
        return [str(error)]
    stated = (info.documents, info.tokens, info.targets, info.text_bytes)
    held = (len(shard), len(shard.tokens), shard.targets, int(shard.text_bytes.sum()))
    wrong = [
        f"{path} holds {was:,} {what} where the manifest says {said:,}; build the data set again."
        for what, was, said in zip(
            ("documents", "tokens", "targets", "bytes of text"), held, stated, strict=True
        )
        if was != said
    ]
    if shard.tokens.dtype != manifest.token_dtype:
        wrong.append(f"{path} holds {shard.tokens.dtype} tokens, not {manifest.token_dtype}.")
    if (shard.mask is not None) != (manifest.kind == "chat"):
        wrong.append(f"{path} is not of the kind {manifest.kind} that the manifest says.")
    wrong += [f"{path}: {what}; build the data set again." for what in _odd(shard, manifest)]
    if tokenizer is not None:
        last = tokenizer.end_id if manifest.kind == "chat" else tokenizer.eos_id
        wrong += [
            f"{path}: {what}; build the data set again."
            for what in _open_ends(shard, tokenizer.bos_id, last)
        ]
    return wrong


def _odd(shard: Shard, manifest: Manifest) -> Iterator[str]:
    """Tokens that cannot be: outside the vocabulary, or counted where nothing comes before."""
    for start in range(0, len(shard.tokens), BLOCK):
        block = shard.tokens[start : start + BLOCK]
        if int(block.max()) >= manifest.vocab_size:
            yield (
                f"token {int(block.argmax()) + start:,} is {int(block.max())} and the vocabulary"
                f" has {manifest.vocab_size}"
            )
            break
        if shard.mask is not None and int(shard.mask[start : start + BLOCK].max()) > 1:
            yield "the loss mask holds more than 0 and 1"
            break
    if (shard.text_bytes < 0).any():
        yield "a document has fewer than no bytes"


def _open_ends(shard: Shard, first: int, last: int) -> Iterator[str]:
    """Documents that do not begin with `first` and end with `last`."""
    for start in range(0, len(shard), BLOCK):
        offsets = shard.offsets[start : start + BLOCK + 1]
        begins, ends = offsets[:-1], offsets[1:] - 1
        if (ends <= begins).any():
            yield f"document {start + int((ends <= begins).argmax()):,} is empty"
            return
        if shard.mask is not None and shard.mask[begins].any():
            yield "the loss mask counts a document's first token"
            return
        for what, places, mark in (("BOS", begins, first), ("its end marker", ends, last)):
            bare = np.flatnonzero(shard.tokens[places] != mark)
            if len(bare):
                edge = "begin with" if what == "BOS" else "end with"
                yield f"document {start + int(bare[0]):,} does not {edge} {what}"
                return
