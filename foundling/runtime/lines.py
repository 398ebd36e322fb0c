"""A file that grows by lines and outlives a full disk.

What cannot be written is kept in memory, and comes first when there is room again: no line is lost
and none is torn. A checkpoint must not be newer than its lines, so `sync` says whether all of them
are safe. Written without Python's buffer, which would lose track of what has reached the file.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from foundling.runtime.files import fsync_dir
from foundling.runtime.log import warn


class LineFile:
    """JSON lines, appended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        """Opened at the first line: where that fails, the line waits."""
        self.error: OSError | None = None
        """Why the last line or sync failed; None if it did not."""
        self._waiting = b""
        """What could not be written yet; may begin inside a line whose first part is there."""
        self._unsafe = b""
        """What was written and not forced to the disk yet."""
        self._safe = 0
        self._is_told = False

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line; if there is no room it waits, and the owner is told once."""
        self._waiting += (json.dumps(line) + "\n").encode()
        try:
            self._write()
        except OSError as error:
            self._tell(error)

    def sync(self) -> bool:
        """Bring every line to the disk; whether that is so."""
        if not self._unsafe and not self._waiting:
            return True
        try:
            self._write()
            os.fsync(self._file)
            if not self._safe:  # perhaps new: its name must be on the disk too
                fsync_dir(self._path.parent)
        except OSError as error:
            self._tell(error)
            self._take_back()
            return False
        self._safe, self._unsafe, self._is_told = os.fstat(self._file).st_size, b"", False
        self.error = None
        return True

    def begin_again(self) -> None:
        """Somebody has cut the file, which is as it should be now: forget what came after."""
        self._safe = os.fstat(self._file).st_size if self._file >= 0 else 0
        self._waiting = self._unsafe = b""

    def _open(self) -> None:
        """Find the file's end; a line that a kill has torn gets one of its own."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        self._safe = os.fstat(self._file).st_size
        if self._safe and os.pread(self._file, 1, self._safe - 1) != b"\n":
            self._waiting = b"\n" + self._waiting

    def _write(self) -> None:
        if self._waiting and self._file < 0:
            self._open()
        while self._waiting:
            count = os.write(self._file, self._waiting)
            self._unsafe += self._waiting[:count]
            self._waiting = self._waiting[count:]

    def _take_back(self) -> None:
        """After a failed fsync nobody knows what the disk has, and the next one may say nothing:
        write everything since the last good one anew."""
        try:
            os.ftruncate(self._file, self._safe)
        except OSError:
            return
        self._waiting, self._unsafe = self._unsafe + self._waiting, b""

    def _tell(self, error: OSError) -> None:
        self.error = error
        if not self._is_told:
            self._is_told = True
            warn(
                f"{self._path} cannot be written ({error.strerror}); training goes on, its lines"
                " are kept in memory and nothing is saved until there is room again."
            )

    def close(self) -> None:
        """The end of it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> "LineFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
