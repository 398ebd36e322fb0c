"""Files that are hashed while they are written, and parts of files that are read as files."""

import contextlib
import hashlib
import io
import os
from collections.abc import Generator, Iterable
from typing import Any, BinaryIO, TypeVar

from foundling.checkpoint.manifest import FileDigest, force_file
from foundling.checkpoint.remote import Folder, RemotePath
from foundling.runtime import files

FILE_BYTES = 1 << 30
"""Of one file of a checkpoint: several are hashed and written at the same time."""
T = TypeVar("T")


class HashingStream(io.RawIOBase):
    """A file that is hashed while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self._hash = hashlib.sha256()
        self._size = 0
        self.failure: BaseException | None = None

    def write(self, data: Any, /) -> int:
        try:
            files.failpoint("write")
            self._hash.update(data)
            written = self.file.write(data)
        except BaseException as error:
            self.failure = error
            raise
        self._size += written
        return written

    def tell(self) -> int:
        return self._size

    @property
    def digest(self) -> FileDigest:
        """What was written."""
        return FileDigest(self._size, self._hash.hexdigest())


@contextlib.contextmanager
def hashing(path: Folder) -> Generator[HashingStream, None, None]:
    """Open a new file; when it is closed it is on the disk."""
    with path.open("wb" if isinstance(path, RemotePath) else "xb") as file:
        stream = HashingStream(file)
        try:
            yield stream
        except BaseException:
            # torch.save reports a full disk as an error about positions in its archive.
            if stream.failure is not None:
                raise stream.failure from None
            raise
        if not isinstance(path, RemotePath):
            force_file(file)


def grouped(sized: Iterable[tuple[T, int]], limit: int) -> list[list[T]]:
    """Things in their order, by their sizes, as many in a group as fit; a larger one is alone."""
    groups: list[list[T]] = [[]]
    room = limit
    for thing, size in sized:
        if groups[-1] and size > room:
            groups.append([])
            room = limit
        groups[-1].append(thing)
        room -= size
    return groups


class Window(io.RawIOBase):
    """A part of a file as a file; nothing outside it can be read."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._place = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._length}[whence]
        if origin + offset < 0:
            raise OSError("a place before the beginning")
        self._place = origin + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        room = max(0, min(len(view), self._length - self._place))
        self._file.seek(self._start + self._place)
        count: int = self._file.readinto(view[:room])  # type: ignore[attr-defined]
        self._place += count
        return count
