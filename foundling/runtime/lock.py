"""One process holds a run directory, and the lock says which.

An flock dies with its holder, so a killed run never leaves a stale lock behind; the file's text is
only for the sentence that refuses the second comer. Rejected: a pid file alone (pids are reused,
and other machines have other pids).
"""

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from types import TracebackType

from foundling.config.errors import RunError


class RunLock:
    """Hold `folder` for writing, or refuse with the holder's name."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"
        self._descriptor = -1

    def __enter__(self) -> "RunLock":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # O_CLOEXEC is Python's default: a child that outlives us must not keep the run locked.
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        if not _try_lock(self._descriptor, fcntl.LOCK_EX):
            os.close(self._descriptor)
            raise RunError(
                f"{self.path.parent} is in use by {self._holder()}; wait for it or stop it."
            )
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(holder).encode(), 0)
        return self

    def _holder(self) -> str:
        try:
            holder = json.loads(self.path.read_text())
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
            return f"process {holder['pid']} on {holder['host']} since {since}"
        except (OSError, ValueError, KeyError):
            return "another process"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)


def is_locked(folder: Path) -> bool:
    """Whether a live process holds the run in `folder`; asking changes nothing there."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _try_lock(descriptor, fcntl.LOCK_SH, patience_s=0)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int, patience_s: float = 0.5) -> bool:
    """Take a lock, waiting out those who only look whether it is held."""
    last = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= last:
                return False
            time.sleep(0.05)
