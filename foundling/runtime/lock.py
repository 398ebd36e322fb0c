"""One job holds a run directory, and the lock says which.

An flock dies with its holder, so on one machine a killed run leaves nothing that has to be broken.
Some shared disks keep flocks within each machine: there the file's text names the holder and its
time stamp is the holder's heartbeat, and a heart that has stopped for minutes is a dead one.

The launcher holds the lock from the first moment; its rank 0 finds its launcher's token in the
environment and takes an inner lock, so that a new job waits until the last writer of a killed one
is gone. Rejected: a pid file alone (pids are reused, and other machines have other pids).
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from foundling.config.errors import RunError
from foundling.runtime.console import warn

TOKEN = "FOUNDLING_LOCK"
"""Variable by which a launcher's ranks know that the lock they find is their own job's."""
HEARTBEAT_S = 15.0
STALE_S = 180.0
"""A holder on another machine that has not touched its lock for so long is dead."""
INNER_PATIENCE_S = 60.0
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True)
class LockHolder:
    """The process that holds a run."""

    pid: int
    host: str
    since: float
    job: str = ""
    """SLURM's job, if it is one."""
    token: str = ""

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        job = f" (SLURM job {self.job})" if self.job else ""
        return f"process {self.pid} on {self.host}{job} since {since}"


class RunLock:
    """Hold `folder` for writing, or refuse with the holder's name."""

    def __init__(self, folder: Path, token: str = "") -> None:
        """A launcher gives a `token` and puts it into its ranks' environment."""
        self.path = folder / "lock"
        self._token = token
        self._descriptor = -1
        self._inner = False
        self._released = threading.Event()

    def __enter__(self) -> "RunLock":
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT):
                raise
            raise RunError(
                f"{self.path.parent} cannot be made; give --run a folder you may write to."
            ) from None
        ours, held = os.environ.get(TOKEN, ""), read_holder(self.path.parent)
        self._inner = bool(not self._token and ours and held and held.token == ours)
        if self._inner:
            self._enter_inner()
            return self
        # O_CLOEXEC is Python's default: a child that outlives us must not keep the run locked.
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        if not _try_lock(self._descriptor, fcntl.LOCK_EX):
            os.close(self._descriptor)
            raise self._refusal(read_holder(self.path.parent))
        before = read_holder(self.path.parent)
        if before is not None and _is_elsewhere(before) and _beats(self.path):
            os.close(self._descriptor)
            raise self._refusal(before)
        if before is not None:
            warn(f"{self.path.parent} was left by {before}, which is gone; taking it over.")
        self._write_holder()
        threading.Thread(target=self._beat, daemon=True, name="lock heartbeat").start()
        return self

    def _enter_inner(self) -> None:
        """Wait for the last writer of a killed job; it dies with its launcher, within moments."""
        place = self.path.with_name("lock.rank0")
        self._descriptor = os.open(place, os.O_RDWR | os.O_CREAT, 0o644)
        if not _try_lock(self._descriptor, fcntl.LOCK_EX, patience_s=INNER_PATIENCE_S):
            os.close(self._descriptor)
            raise RunError(
                f"a process of an earlier job still writes to {self.path.parent}; stop it first"
                f" (`fuser {place}` names it)."
            )

    def _refusal(self, holder: LockHolder | None) -> RunError:
        who = holder or "another process"
        return RunError(
            f"{self.path.parent} is in use by {who}; wait for it, or stop it with `foundling runs"
            f" stop {self.path.parent}`."
        )

    def _write_holder(self) -> None:
        holder = LockHolder(
            pid=os.getpid(),
            host=socket.gethostname(),
            since=time.time(),
            job=os.environ.get("SLURM_JOB_ID", ""),
            token=self._token,
        )
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(asdict(holder)).encode(), 0)

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self.path)

    def __exit__(self, *_: object) -> None:
        self._released.set()
        if not self._inner:
            # An empty file says that the holder left in order.
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)


def read_holder(folder: Path) -> LockHolder | None:
    """The process that the lock names, alive or not; None if it was given back or never taken."""
    try:
        return LockHolder(**json.loads((folder / "lock").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def release_lock(folder: Path) -> bool:
    """Empty the lock if this process holds it, which ends without leaving `RunLock`; whether it
    did."""
    holder = read_holder(folder)
    is_ours = bool(holder and (holder.pid, holder.host) == (os.getpid(), socket.gethostname()))
    if is_ours:
        os.truncate(folder / "lock", 0)
    return is_ours


def is_locked(folder: Path) -> bool:
    """Whether a live process holds the run in `folder`; asking changes nothing there."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        if not _try_lock(descriptor, fcntl.LOCK_SH, patience_s=0):
            return True
    finally:
        os.close(descriptor)
    holder = read_holder(folder)
    return holder is not None and _is_elsewhere(holder) and _beats(folder / "lock")


def _is_elsewhere(holder: LockHolder) -> bool:
    """Whether the holder could be alive although its flock is not seen here. An earlier life of the
    same SLURM job could not: SLURM ends one before it begins the next."""
    if holder.job and holder.job == os.environ.get("SLURM_JOB_ID"):
        return False
    return holder.host != socket.gethostname()


def _beats(lock: Path) -> bool:
    """Whether the heartbeat is recent, by the clock of the disk that both machines write to."""
    probe = lock.with_name(f"lock.clock-{socket.gethostname()}-{os.getpid()}")
    try:
        probe.touch()
        now = probe.stat().st_mtime
    except OSError:
        now = time.time()
    finally:
        probe.unlink(missing_ok=True)
    try:
        return now - lock.stat().st_mtime < STALE_S
    except OSError:
        return False


def _try_lock(descriptor: int, kind: int, patience_s: float = 0.5) -> bool:
    """Take a lock, waiting while other processes only test whether it is held."""
    last = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= last:
                return False
            time.sleep(0.05)
        except OSError as error:
            if error.errno in _UNSUPPORTED:  # a disk without locks: the heartbeat has to do
                return True
            raise
