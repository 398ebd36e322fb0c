"""Shards against the checksums in their manifest, on all cores, each read once.

A first start and `data verify` hash everything. A resume must not wait for terabytes that were
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

from foundling.config.manifest import Manifest, ShardInfo
from foundling.runtime.files import sha256_file, write_text_atomic

NOTE = ".verified.json"
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


def damage(
    folder: Path,
    manifest: Manifest,
    *,
    changed_only: bool = False,
    workers: int = 0,
    progress: Progress | None = None,
) -> list[str]:
    """A sentence for every shard that is not what the manifest says; notes what was whole."""
    noted = _read_note(folder) if changed_only else {}
    doubtful = [
        info for info in all_shards(manifest) if noted.get(info.name) != _mark(folder, info)
    ]
    found = each_of(
        doubtful, lambda info: wrong_hash(folder, info), workers=workers, progress=progress
    )
    sentences = [sentence for sentence in found if sentence]
    if doubtful and not sentences:
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
