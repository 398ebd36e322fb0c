"""Hashes of files that somebody will soon ask for, computed while torch is being imported.

An import keeps one core busy for seconds and a checkpoint's hashes another; one after the other
they would take as long as both. A wrong guess costs nothing but the other core's time, and a hash
counts only as long as its file is the same file with the same times.
"""

import hashlib
import mmap
import os
import re
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

WINDOW = 64 << 20
"""Bytes that are hashed at once: in between the thread has to wait for Python's lock, which an
import does not let go of gladly."""
_STEP = re.compile(r"step-(\d+)")
_Stamp = tuple[int, int, int]
_jobs: dict[str, tuple[_Stamp, Future[str]]] = {}


def hash_ahead(files: Iterable[Path]) -> None:
    """Begin to hash files, one after the other, in a thread of their own."""
    pool = ThreadPoolExecutor(1)
    for file in files:
        try:
            _jobs[str(file.resolve())] = (_stamp(file), pool.submit(_sha256, file))
        except OSError:
            continue
    pool.shutdown(wait=False)


def hash_of(file: Path) -> str | None:
    """The sha256 of a file that was begun, once; None if it was not, or is another file now."""
    stamp, job = _jobs.pop(str(file.resolve()), (None, None))
    if job is None or job.cancel():  # not begun yet: whoever asks is as fast
        return None
    try:
        found = job.result()
        return found if _stamp(file) == stamp else None
    except (OSError, ValueError):
        return None


def newest_checkpoint(source: str) -> list[Path]:
    """The files that a run's name most likely means; none for anything else."""
    place, _, step = source.partition("@")
    chosen = Path(place)
    if not _STEP.fullmatch(chosen.name):
        found = [path for path in (chosen / "checkpoints").glob("step-*") if _number(path) >= 0]
        wanted = [path for path in found if not step or str(_number(path)) == step.lstrip("0")]
        chosen = max(wanted, key=_number, default=chosen)
    if not (chosen / "manifest.json").is_file():
        return []
    return sorted(file for file in chosen.iterdir() if file.is_file())


def _number(path: Path) -> int:
    found = _STEP.fullmatch(path.name)
    return int(found[1]) if found else -1


def _stamp(file: Path) -> _Stamp:
    found = os.stat(file)
    return found.st_ino, found.st_size, found.st_mtime_ns


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        for start in range(0, size, WINDOW):
            length = min(WINDOW, size - start)
            with mmap.mmap(
                stream.fileno(), length, offset=start, access=mmap.ACCESS_READ
            ) as memory:
                digest.update(memory)
    return digest.hexdigest()
