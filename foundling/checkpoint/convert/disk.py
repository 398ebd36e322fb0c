"""What was written is forced to the disk behind the back of the writing.

A file that is forced when it is finished lets both cores wait for the disk; here a thread does it
piece by piece while the next tensor is written, and the comparison goes on beside it. A result gets
its name only after `wait`.
"""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO

from foundling.runtime import points

PIECE = 256 << 20
"""Bytes after which the disk is told to begin."""


class Disk:
    """One conversion's files on their way to the disk."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []
        self._behind = 0

    def wrote(self, file: BinaryIO, size: int) -> None:
        """So many more bytes of an open file were written."""
        self._behind += size
        if self._behind >= PIECE:
            self._start(file)

    def finish(self, file: BinaryIO) -> None:
        """Nothing more is written to a file; it may be closed."""
        file.flush()
        points.at("fsync")
        self._start(file)

    def wait(self) -> None:
        """Return when all is on the disk, or raise what went wrong."""
        for job in self._jobs:
            job.result()
        self._jobs.clear()

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None

    def _start(self, file: BinaryIO) -> None:
        self._behind = 0
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1)
        self._jobs.append(self._pool.submit(_force, os.dup(file.fileno())))


def _force(number: int) -> None:
    try:
        os.fsync(number)
    finally:
        os.close(number)
