"""Hashes of files that somebody will soon ask for, computed while torch is being imported.

An import keeps one core busy for seconds and a checkpoint's hashes another; one after the other
they would take as long as both. A wrong guess costs nothing but the other core's time, and a hash
counts only as long as its file is the same file with the same times. Nobody waits for the thread:
a command that is refused ends at once.
"""

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path

WINDOW = 4 << 20
"""Bytes that are hashed at once: in between the thread has to wait for Python's lock, which an
import does not let go of gladly; and four times as many no longer stay in the processor's cache."""
_STEP = re.compile(r"step-(\d+)")
Stamp = tuple[int, ...]
"""Tells a file from another one, and from itself before somebody wrote to it."""
_jobs: dict[str, tuple[Stamp, Future[str]]] = {}


def hash_ahead(files: Iterable[Path], after: Callable[[], None] = lambda: None) -> None:
    """Begin to hash files, one after the other, in a thread of their own, once `after` returns."""
    begun: list[tuple[Path, Future[str]]] = []
    for file in files:
        try:
            stamp, job = stamp_of(file), Future[str]()
        except OSError:
            continue
        _jobs[str(file.resolve())] = (stamp, job)
        begun.append((file, job))
    threading.Thread(target=_hash_all, args=(begun, after), daemon=True).start()


def _hash_all(begun: Iterable[tuple[Path, Future[str]]], after: Callable[[], None]) -> None:
    after()
    for file, job in begun:
        if not job.set_running_or_notify_cancel():
            continue
        try:
            job.set_result(_sha256(file))
        except Exception as error:  # whoever asks hashes it himself, and hears of it then
            job.set_exception(error)


def hash_of(file: Path) -> str | None:
    """The sha256 of a file that was begun, once; None if it was not, or is another file now."""
    stamp, job = _jobs.pop(str(file.resolve()), (None, None))
    if job is None or job.cancel():  # not begun yet: whoever asks is as fast
        return None
    try:
        found = job.result()
        return found if stamp_of(file) == stamp else None
    except (OSError, MemoryError):
        return None


def newest_checkpoint(source: str) -> list[Path]:
    """The files that a run's name most likely means; none for anything else."""
    try:
        return _newest(source)
    except (OSError, ValueError):  # no name of a file, or nothing that may be looked at
        return []


def _newest(source: str) -> list[Path]:
    place, _, step = source.partition("@")
    chosen = Path(place)
    if not _STEP.fullmatch(chosen.name):
        found = [path for path in (chosen / "checkpoints").glob("step-*") if _number(path) >= 0]
        meant = step.lstrip("0") or "0"
        wanted = [path for path in found if not step or str(_number(path)) == meant]
        chosen = max(wanted, key=_number, default=chosen)
    if not (chosen / "manifest.json").is_file():
        return []
    return sorted(file for file in chosen.iterdir() if file.is_file())


def _number(path: Path) -> int:
    found = _STEP.fullmatch(path.name)
    return int(found[1]) if found else -1


def stamp_of(file: Path | int) -> Stamp:
    """Of a file by its name, or an open one by its number."""
    found = os.stat(file)
    # Who writes in place can set the time of writing back, but not that of the last change.
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _sha256(file: Path) -> str:
    """Read and not mapped: a disk that fails, or a file that is cut off meanwhile, is an error
    to a read and the end of the process to a map."""
    digest = hashlib.sha256()
    with open(file, "rb", buffering=0) as stream:
        memory = memoryview(bytearray(min(WINDOW, os.fstat(stream.fileno()).st_size)))
        while memory and (length := stream.readinto(memory)):
            digest.update(memory[:length])
    return digest.hexdigest()
