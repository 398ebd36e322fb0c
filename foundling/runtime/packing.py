"""The tensors of a model, put into the files of another layout while torch is imported.

From a Hugging Face folder into a checkpoint's files, and from a checkpoint into safetensors. An
import keeps one core busy for seconds, and a conversion's copies and hashes another. Nothing here
knows a model: tensors go in the order of their files, and what they are called is said later, by an
index or a header for which room is left. So nothing depends on a guess: whoever writes the result
takes the files if they hold exactly the tensors that he was about to write, from files that did not
change since, and otherwise writes as if nothing had been there. What he does with a result before
it gets its name (reading it back, comparing every bit) is the same for both.
"""

import contextlib
import hashlib
import json
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import NamedTuple

from foundling.runtime import points
from foundling.runtime.ahead import Stamp, newest_checkpoint, stamp_of
from foundling.runtime.archives import frame
from foundling.runtime.kernel_copy import PAGE, Span, copied, evenness
from foundling.runtime.payloads import (
    Payload,
    UnfitError,
    checkpoint_payloads,
    folder_files,
    folder_payloads,
)
from foundling.runtime.shards import grouped, shard_names

FILE_BYTES = 1 << 30
"""A file of a checkpoint is closed when it has this much: they are hashed and written beside each
other."""
WINDOW = 64 << 20
"""Bytes that are mapped and hashed at once; they count as memory meanwhile."""
CLOSED = -1
"""In place of the number of an open file."""
LONGER_NAME = 32
"""Letters that Hugging Face's name of a tensor may have more than ours."""


class Packed(NamedTuple):
    """Where a tensor was put: its archive, or in a safetensors file its numbers."""

    file: str
    start: int
    length: int
    kind: str
    shape: tuple[int, ...]


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


class _Form(NamedTuple):
    """From what into what."""

    find: Callable[[], list[Payload]]
    lay_out: Callable[[Sequence[Payload]], tuple[list[_File], dict[Span, Packed]]]
    is_sealed: bool
    """Whether the result states the hashes of its files."""


class Packing:
    """A thread that packs into a new folder, which is gone afterwards with all that nobody took."""

    def __init__(self, form: _Form, folder: Path) -> None:
        self._form, self._folder = form, folder
        self._is_taken = False
        self._unwanted = threading.Event()
        self._stamps: dict[Path, Stamp] = {}
        self._packed: dict[Span, Packed] = {}
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
            if (number := self._open.popitem()[1]) != CLOSED:
                os.close(number)
        shutil.rmtree(self._folder, ignore_errors=True)

    def take(self, wanted: Mapping[Span, tuple[str, tuple[int, ...]]], folder: Path) -> bool:
        """Move the files into a folder if they hold these tensors (by where their bytes come from:
        kind and shape), no other ones, and as their sources are now; they may not be hashed yet.
        Otherwise they are gone: the disk may have no room for a second copy."""
        if not self._holds(wanted):
            self.drop()
            return False
        self._is_taken = True
        for name in self._open:
            os.rename(self._folder / name, folder / name)
        return True

    def _holds(self, wanted: Mapping[Span, tuple[str, tuple[int, ...]]]) -> bool:
        try:
            self._planned.result()
            have = {span: (one.kind, one.shape) for span, one in self._packed.items()}
            if have != wanted or self._is_taken:
                return False
            self._copied.result()
            return self._stamps == {path: stamp_of(path) for path in self._stamps}
        except (OSError, UnfitError):
            return False

    def wait(self) -> None:
        """Return when all is copied, or will never be."""
        self._copied.exception()

    def place(self, span: Span) -> Packed:
        """Where a tensor was put."""
        return self._packed[span]

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
                    awaited.set_exception(UnfitError(str(error)))
            return
        if not self._form.is_sealed:
            return
        try:
            self._hashed.set_result({name: self._hash(name) for name in self._open})
        except Exception as error:
            self._hashed.set_exception(error)

    def _pack(self) -> None:
        payloads = self._form.find()
        files, self._packed = self._form.lay_out(payloads)
        self._planned.set_result(None)
        opened: dict[Path, int] = {}
        try:
            for path in {payload.span.path for payload in payloads}:
                opened[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._stamps[path] = stamp_of(opened[path])
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
                raise UnfitError
        _put(target, file.tail, file.size - len(file.tail))
        if not self._form.is_sealed:  # nobody reads it again, and there may be thousands
            self._open[file.name] = CLOSED
            os.close(target)

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
            raise UnfitError


@contextlib.contextmanager
def packing(source: str, target: Path, to: str, shard_bytes: int) -> Iterator[Packing | None]:
    """Pack what a name most likely means, beside a target; None for anything else."""
    begun = _begin(source, target, to, shard_bytes)
    if begun is None:
        yield None
        return
    with begun:
        yield begun


def _begin(source: str, target: Path, to: str, shard_bytes: int) -> Packing | None:
    """A wrong guess is no error: whatever refuses a source or a target does so later."""
    try:
        form = _to_native(source) if to == "native" else None
        form = _to_hf(source, target, shard_bytes) if to == "hf" else form
        if form is None or target.exists() or target.is_symlink():
            return None
        folder = target.with_name(f".{target.name}.tmp-ahead-{os.getpid()}")
        shutil.rmtree(folder, ignore_errors=True)  # of a process with our number that was killed
        folder.mkdir()  # and no folder above it, which would have to go again
        return Packing(form, folder)
    except Exception:
        return None


def _to_native(source: str) -> _Form | None:
    files = folder_files(Path(source))
    return _Form(partial(folder_payloads, files), _archives, is_sealed=True) if files else None


def _to_hf(source: str, target: Path, shard_bytes: int) -> _Form | None:
    files = newest_checkpoint(source)
    # Something new among checkpoints would be taken for damage.
    if not files or files[0].resolve().parents[1] in target.resolve().parents:
        return None
    find = partial(checkpoint_payloads, files[0].parent)
    return _Form(find, partial(_safetensors, shard_bytes), is_sealed=False)


def _archives(payloads: Sequence[Payload]) -> tuple[list[_File], dict[Span, Packed]]:
    """A checkpoint's files, with an archive of torch's for each tensor."""
    files: list[_File] = []
    packed: dict[Span, Packed] = {}
    for number, group in enumerate(_groups(payloads, FILE_BYTES)):
        name, writes, end, tail = f"__0_{number}.distcp", list[_Write](), 0, b""
        for span, kind, shape, _ in group:
            head, next_tail = frame(kind, shape)
            gap = -(end + len(tail) + len(head)) % evenness(span.size)
            start = end + len(tail) + gap
            joint = tail + bytes(gap) + head
            writes.append(_Write(end, joint, span))
            end, tail = end + len(joint) + span.size, next_tail
            packed[span] = Packed(name, start, end + len(tail) - start, kind, shape)
        files.append(_File(name, writes, tail, end + len(tail)))
    return files, packed


def _safetensors(
    shard_bytes: int, payloads: Sequence[Payload]
) -> tuple[list[_File], dict[Span, Packed]]:
    """Files with room for a header, and the tensors without a gap: the format allows none."""
    files: list[_File] = []
    packed: dict[Span, Packed] = {}
    groups = _groups(payloads, shard_bytes)
    for name, group in zip(shard_names(len(groups)), groups, strict=True):
        writes, end = list[_Write](), _header_room(group)
        for span, kind, shape, _ in group:
            writes.append(_Write(end, b"", span))
            packed[span] = Packed(name, end, span.size, kind, shape)
            end += span.size
        files.append(_File(name, writes, b"", end))
    return files, packed


def _header_room(group: Sequence[Payload]) -> int:
    """Bytes before the numbers, enough for any names: what is too much is filled with spaces."""
    most = sum(span.size for span, *_ in group)
    entries = {
        name + "." * LONGER_NAME: {"dtype": kind, "shape": shape, "data_offsets": [most, most]}
        for _, kind, shape, name in group
    }
    size = len(json.dumps({"__metadata__": {"format": "pt"}, **entries})) + 8
    return size + -size % PAGE


def _groups(payloads: Sequence[Payload], limit: int) -> list[list[Payload]]:
    """Which go into which file."""
    return grouped(((payload, payload.span.size) for payload in payloads), limit)


def _put(target: int, content: bytes, place: int) -> None:
    """A write that is cut short is a disk that is full, and the next one would say so."""
    if os.pwrite(target, content, place) != len(content):
        raise UnfitError
