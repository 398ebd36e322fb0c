"""The tensors of a Hugging Face folder, put into a checkpoint's files while torch is imported.

An import keeps one core busy for seconds, and a conversion's copies and hashes another. Nothing
here knows a model: tensors go in the order of their files, each into an archive of its own, and
what they are called is said later, by an index. So nothing depends on a guess: whoever writes the
checkpoint takes the files if they hold exactly the tensors that he was about to write, from files
that did not change since, and otherwise writes as if nothing had been there. What he does with a
result before it gets its name (reading it back, comparing every bit) is the same for both.
"""

import contextlib
import hashlib
import json
import math
import mmap
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from foundling.runtime import points
from foundling.runtime.ahead import Stamp, stamp_of
from foundling.runtime.archives import BYTES, LARGEST, frame
from foundling.runtime.kernel_copy import LARGE, PAGE, Span, copied

FILE_BYTES = 1 << 30
"""A file of a checkpoint is closed when it has this much: they are hashed and written beside each
other."""
ALIGNED = 64
"""Bytes to a multiple of which numbers begin: torch's own measure."""
WINDOW = 64 << 20
"""Bytes that are mapped and hashed at once; they count as memory meanwhile."""
MAX_HEADER = 100 << 20
SIGN = "model.embed_tokens.weight"
"""The name of the embedding in the layout whose tensors lie as ours."""


class Archive(NamedTuple):
    """Where the archive of a tensor lies, and what it says of it."""

    file: str
    start: int
    length: int
    kind: str
    shape: tuple[int, ...]


class _Tensor(NamedTuple):
    """One of a safetensors file."""

    span: Span
    kind: str
    shape: tuple[int, ...]
    name: str


class _Write(NamedTuple):
    """Bytes of archives, and the numbers that follow them."""

    place: int
    joint: bytes
    numbers: Span


class _File(NamedTuple):
    """A file that is to be written."""

    name: str
    writes: list[_Write]
    tail: bytes
    size: int


class _UnfitError(Exception):
    """What is there cannot be packed; the usual way says whether something is wrong with it."""


class Packing:
    """A thread that packs into a new folder, which is gone afterwards with all that nobody took."""

    def __init__(self, sources: Sequence[Path], folder: Path) -> None:
        self._sources, self._folder = sources, folder
        self._unwanted = threading.Event()
        self._stamps: dict[Path, Stamp] = {}
        self._archives: dict[Span, Archive] = {}
        self._open: dict[str, int] = {}
        self._planned: Future[None] = Future()
        self._copied: Future[None] = Future()
        self._hashed: Future[dict[str, tuple[int, str]]] = Future()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> "Packing":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def drop(self) -> None:
        """End, and leave nothing of it on the disk; once is enough."""
        self._unwanted.set()
        self._thread.join()
        while self._open:
            os.close(self._open.popitem()[1])
        shutil.rmtree(self._folder, ignore_errors=True)

    def take(self, wanted: Mapping[Span, tuple[str, tuple[int, ...]]], folder: Path) -> bool:
        """Move the files into a folder if they hold these tensors (by where their bytes come from:
        kind and shape), no other ones, and as their sources are now; they may not be hashed yet.
        Otherwise they are gone: the disk may have no room for a second copy."""
        if not self._holds(wanted):
            self.drop()
            return False
        for name in self._open:
            os.rename(self._folder / name, folder / name)
        return True

    def _holds(self, wanted: Mapping[Span, tuple[str, tuple[int, ...]]]) -> bool:
        try:
            self._planned.result()
            have = {span: (one.kind, one.shape) for span, one in self._archives.items()}
            if have != wanted:
                return False
            self._copied.result()
            return self._stamps == {path: stamp_of(path) for path in self._stamps}
        except (OSError, _UnfitError):
            return False

    def archive(self, span: Span) -> Archive:
        """Where a tensor was put."""
        return self._archives[span]

    def hashed(self) -> Mapping[str, tuple[int, str]]:
        """Size and sha256 of each file, once they are known."""
        return self._hashed.result()

    def _work(self) -> None:
        try:
            self._pack()
            self._copied.set_result(None)
        except Exception as error:  # whatever it is, the usual way meets it too, and says it
            for awaited in (self._planned, self._copied):
                if not awaited.done():
                    awaited.set_exception(_UnfitError(str(error)))
            return
        try:
            self._hashed.set_result({name: self._hash(name) for name in self._open})
        except Exception as error:
            self._hashed.set_exception(error)

    def _pack(self) -> None:
        opened: dict[Path, int] = {}
        try:
            tensors: list[_Tensor] = []
            for path in self._sources:
                opened[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._stamps[path] = stamp_of(opened[path])
                tensors += _tensors(path, opened[path])
            if SIGN not in {tensor.name for tensor in tensors}:
                raise _UnfitError
            files, self._archives = _laid_out(tensors)
            self._planned.set_result(None)
            for file in files:
                self._write(file, opened)
        finally:
            for number in opened.values():
                os.close(number)

    def _write(self, file: _File, opened: Mapping[Path, int]) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        target = self._open[file.name] = os.open(self._folder / file.name, flags, 0o666)
        for place, joint, numbers in file.writes:
            self._alive()
            points.at("write")
            _put(target, joint, place)
            if not copied(opened[numbers.path], numbers, target, place + len(joint)):
                raise _UnfitError
        _put(target, file.tail, file.size - len(file.tail))

    def _hash(self, name: str) -> tuple[int, str]:
        """Of the file that was written, and not of what it was written from."""
        digest, size = hashlib.sha256(), os.fstat(self._open[name]).st_size
        for start in range(0, size, WINDOW):
            self._alive()
            length = min(WINDOW, size - start)
            with mmap.mmap(
                self._open[name], length, offset=start, access=mmap.ACCESS_READ
            ) as memory:
                digest.update(memory)
        return size, digest.hexdigest()

    def _alive(self) -> None:
        if self._unwanted.is_set():
            raise _UnfitError


@contextlib.contextmanager
def packing(source: str, target: Path) -> Iterator[Packing | None]:
    """Pack what a name most likely means, beside a target; None for anything else."""
    begun = _begin(source, target)
    if begun is None:
        yield None
        return
    with begun:
        yield begun


def _begin(source: str, target: Path) -> Packing | None:
    """A wrong guess is no error: whatever refuses a source or a target does so later."""
    try:
        sources = _sources(Path(source))
        if not sources or target.exists() or target.is_symlink():
            return None
        folder = target.with_name(f".{target.name}.tmp-ahead-{os.getpid()}")
        folder.mkdir()  # and no folder above it, which would have to go again
        return Packing(sources, folder)
    except Exception:
        return None


def _sources(folder: Path) -> list[Path]:
    if (folder / "run.json").exists() or not (folder / "config.json").is_file():
        return []
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        shards = json.loads(index.read_text())["weight_map"].values()
        files = [folder / name for name in sorted(set(map(str, shards)))]
        return files if all(file.parent == folder and file.is_file() for file in files) else []
    return [single] if single.is_file() else []


def _tensors(path: Path, number: int) -> list[_Tensor]:
    """What lies in a safetensors file, in its order."""
    length = int.from_bytes(os.pread(number, 8, 0), "little")
    if length > MAX_HEADER:
        raise _UnfitError
    header: dict[str, Any] = json.loads(os.pread(number, length, 8))
    header.pop("__metadata__", None)
    found = []
    for name, entry in header.items():
        kind, shape = entry["dtype"], tuple(map(int, entry["shape"]))
        begin, end = map(int, entry["data_offsets"])
        size = math.prod(shape) * BYTES.get(kind, 0)
        is_weight = name.endswith((".weight", ".bias"))
        if not is_weight or not 0 < size <= LARGEST or min(shape) < 0 or end - begin != size:
            raise _UnfitError
        found.append(_Tensor(Span(path, 8 + length + begin, size), kind, shape, name))
    return sorted(found)


def _laid_out(tensors: Sequence[_Tensor]) -> tuple[list[_File], dict[Span, Archive]]:
    files: list[_File] = []
    archives: dict[Span, Archive] = {}
    for number, group in enumerate(_groups(tensors)):
        name, writes, end, tail = f"__0_{number}.distcp", list[_Write](), 0, b""
        for span, kind, shape, _ in group:
            head, next_tail = frame(kind, shape)
            step = PAGE if span.size >= LARGE else ALIGNED
            gap = -(end + len(tail) + len(head)) % step
            start = end + len(tail) + gap
            joint = tail + bytes(gap) + head
            writes.append(_Write(end, joint, span))
            end, tail = end + len(joint) + span.size, next_tail
            archives[span] = Archive(name, start, end + len(tail) - start, kind, shape)
        files.append(_File(name, writes, tail, end + len(tail)))
    return files, archives


def _groups(tensors: Sequence[_Tensor]) -> list[list[_Tensor]]:
    """Which go into which file."""
    groups: list[list[_Tensor]] = [[]]
    room = FILE_BYTES
    for tensor in tensors:
        if groups[-1] and tensor.span.size > room:
            groups.append([])
            room = FILE_BYTES
        groups[-1].append(tensor)
        room -= tensor.span.size
    return groups


def _put(target: int, content: bytes, place: int) -> None:
    """A write that is cut short is a disk that is full, and the next one would say so."""
    if os.pwrite(target, content, place) != len(content):
        raise _UnfitError
