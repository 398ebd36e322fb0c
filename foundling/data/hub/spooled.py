"""Files without a name: content that is on disk only as long as somebody reads it.

A temporary file is unlinked as soon as it is made, so that nothing of the raw source is left
behind, not even by a kill. One is remembered in each process, because some formats are opened twice
in a row: once to see what they are, and once to read them.
"""

import atexit
import contextlib
import io
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, BinaryIO, cast

from foundling.config.errors import DataError

BUFFER = 1 << 20
_lock = threading.Lock()
_last: list[tuple[str, IO[bytes]]] = []


def spooled(key: str, size: int | None, what: str, fill: Callable[[IO[bytes]], None]) -> BinaryIO:
    """What `fill` writes, to be read from the start; the last `key` of a process is not filled
    again."""
    with _lock:
        if not _last or _last[0][0] != key:
            _drop()
            out = _nameless(size or 0, what)
            with contextlib.ExitStack() as undo:
                undo.callback(out.close)
                fill(out)
                out.flush()
                undo.pop_all()
            _last.append((key, out))
        return cast(BinaryIO, io.BufferedReader(_View(os.dup(_last[0][1].fileno())), BUFFER))


def forget() -> None:
    """Give back the room of the last one; readers keep what they have open."""
    with _lock:
        _drop()


def _drop() -> None:
    while _last:
        _last.pop()[1].close()


atexit.register(forget)


def check_room(folder: Path, needed: int, what: str) -> None:
    """Say that a disk is too small before it is full."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"{what} needs {needed / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} free; make room,"
            " or set HF_HUB_CACHE (with --stream: TMPDIR) to a larger disk."
        )


def _nameless(size: int, what: str) -> IO[bytes]:
    check_room(Path(tempfile.gettempdir()), size, what)
    return tempfile.TemporaryFile(prefix="foundling-")


class _View(io.RawIOBase):
    """One reader of a file that others read too: with a place of its own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview | bytearray") -> int:  # type: ignore[override]
        count = os.preadv(self._descriptor, [buffer], self._place)
        self._place += count
        return count

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._place, os.fstat(self._descriptor).st_size)[whence]
        self._place = max(0, base + offset)
        return self._place

    def tell(self) -> int:
        return self._place

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()
