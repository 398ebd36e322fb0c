"""Files that are hashed while they are written, and parts of files that are read as files."""

import contextlib
import hashlib
import io
import mmap
import os
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO

from foundling.checkpoint.remote import Folder, RemotePath
from foundling.checkpoint.seal import FileSeal, force_file
from foundling.runtime import points
from foundling.runtime.kernel_copy import LARGE, Span, append


class SealingStream(io.RawIOBase):
    """A file that is hashed while it is written; with `helper`, by that one thread."""

    def __init__(self, file: BinaryIO, helper: ThreadPoolExecutor | None = None) -> None:
        self.file, self._helper = file, helper
        self._hash = hashlib.sha256()
        self._size = 0
        self._jobs: list[Future[None]] = []
        self.failure: BaseException | None = None
        self.lies: Span | None = None
        """A part of a file that holds the very bytes that are written next, if they are as many."""

    def write(self, data: Any, /) -> int:
        job = None
        try:
            points.at("write")
            span = self._span_of(len(data))
            if span is None:
                job = self._hash_memory(data)
            else:
                self._hash_file(span)
            is_copied = span is not None and append(span, self.file)
            written = len(data) if is_copied else self.file.write(data)
        except BaseException as error:
            self.failure = error
            raise
        finally:
            if job is not None:  # the memory is the caller's again afterwards
                job.result()
        self._size += written
        return written

    def _span_of(self, size: int) -> Span | None:
        """The part of a file that holds the bytes to be written, where the kernel may copy them."""
        span = self.lies
        if span is None or span.size != size or size < LARGE:
            return None
        self.lies = None
        return span

    def _hash_file(self, span: Span) -> None:
        """The hash of bytes that stay where they lie, so that nobody waits for it: it is begun
        before they are copied, and takes twice as long."""
        if self._helper is None:
            _hash_span(self._hash, span)
        else:
            self._jobs.append(self._helper.submit(_hash_span, self._hash, span))

    def _hash_memory(self, data: Any) -> "Future[None] | None":
        """The hash in its turn, to be waited for where it needs the caller's own memory."""
        if self._helper is None:
            self._hash.update(data)
            return None
        if len(data) >= LARGE:
            return self._helper.submit(self._hash.update, data)
        self._jobs.append(self._helper.submit(self._hash.update, bytes(data)))
        return None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    @property
    def sealed(self) -> FileSeal:
        """What was written, once all of it is hashed."""
        for job in self._jobs:
            job.result()
        return FileSeal(self._size, self._hash.hexdigest())


def _hash_span(found: Any, span: Span) -> None:
    before = span.start % mmap.ALLOCATIONGRANULARITY
    with (
        open(span.path, "rb") as file,
        mmap.mmap(
            file.fileno(),
            before + span.size,
            offset=span.start - before,
            access=mmap.ACCESS_READ,
        ) as memory,
        memoryview(memory)[before:] as part,
    ):
        found.update(part)


@contextlib.contextmanager
def sealing(
    path: Folder,
    helper: ThreadPoolExecutor | None = None,
    force: Callable[[BinaryIO], None] = force_file,
) -> Generator[SealingStream, None, None]:
    """Open a new file; when it is closed it is on the disk, or on its way if `force` is lenient."""
    with path.open("wb" if isinstance(path, RemotePath) else "xb") as file:
        stream = SealingStream(file, helper)
        try:
            yield stream
        except BaseException:
            # torch.save hides a full disk behind a complaint about positions in its archive.
            if stream.failure is not None:
                raise stream.failure from None
            raise
        if not isinstance(path, RemotePath):
            force(file)


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
        data = self._file.read(room)
        view[: len(data)] = data
        self._place += len(data)
        return len(data)
