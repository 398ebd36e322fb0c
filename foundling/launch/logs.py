"""Where the output of every process of a job is kept, and how it is read while it grows.

RUN/logs/LAUNCH/launch.json         who started it, when, with how many processes
RUN/logs/LAUNCH/end.json            how it ended, once it has
RUN/logs/LAUNCH/try-0/rank-00000.log   what rank 0 wrote; one file a rank
RUN/logs/LAUNCH/try-0/rank-00000.json  how rank 0 ended
RUN/logs/LAUNCH/try-0/agent-HOST.log   what torchrun wrote
RUN/logs/launcher.log               what a detached launcher wrote
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from foundling.config.errors import RunError
from foundling.runtime.files import write_text_atomic

POLL_S = 0.1
TAIL_BYTES = 8192
"""How much of the past `runs logs` shows first."""


def wait_until(is_done: Callable[[], bool], limit_s: float, poll_s: float = POLL_S) -> bool:
    """Wait for something; whether it came true within so many seconds."""
    last = time.monotonic() + limit_s
    while not is_done():
        if time.monotonic() > last:
            return False
        time.sleep(poll_s)
    return True


def log_name(rank: int) -> str:
    """The file of a rank's output."""
    return f"rank-{rank:05d}.log"


def pid_name(rank: int) -> str:
    """The file of a rank's process number."""
    return f"rank-{rank:05d}.pid"


def ranks_file(folder: Path, node: int) -> Path:
    """The file in which the ranks of a node write themselves down: rank, process and machine. So a
    launcher finds its own without listing those of all the others."""
    return folder / f"node-{node:05d}.ranks"


def launcher_log(run: Path) -> Path:
    """The file of a detached launcher's own output."""
    return run / "logs" / "launcher.log"


def new_launch(run: Path, name: str, about: dict[str, Any]) -> Path:
    """A folder for one launch; `name` is given where several nodes must agree on it."""
    folder = run / "logs" / name
    folder.mkdir(parents=True, exist_ok=True)
    who = {"host": socket.gethostname(), "pid": os.getpid()}
    text = json.dumps({"started": time.time(), **who, **about}, indent=2)
    write_text_atomic(folder / "launch.json", text + "\n")
    return folder


def note_end(folder: Path, code: int, sentence: str) -> None:
    """Write to the log how a launch ended."""
    text = json.dumps({"code": int(code), "sentence": sentence})
    write_text_atomic(folder / "end.json", text + "\n")


def last_end(run: Path) -> tuple[int, str] | None:
    """Code and sentence of the newest launch, if it has ended and could say so."""
    launches = sorted((run / "logs").glob("*/launch.json"), key=_started)
    try:
        said = json.loads((launches[-1].parent / "end.json").read_text())
        return int(said["code"]), str(said["sentence"])
    except (IndexError, OSError, ValueError, KeyError):
        return None


def tries(run: Path) -> list[Path]:
    """Every try of every launch of a run, oldest first."""
    launches = sorted((run / "logs").glob("*/launch.json"), key=_started)
    return [
        folder
        for note in launches
        for folder in sorted(note.parent.glob("try-*"), key=lambda p: int(p.name[4:]))
    ]


def _started(note: Path) -> float:
    try:
        return float(json.loads(note.read_text())["started"])
    except (OSError, ValueError, KeyError):
        return note.stat().st_mtime


def newest_log(run: Path, rank: int = 0) -> Path | None:
    """The file that a rank writes to, or last wrote to."""
    for folder in reversed(tries(run)):
        if (path := folder / log_name(rank)).is_file():
            return path
    return None


def require_log(run: Path, rank: int) -> Path:
    """The same, or a sentence saying which ranks there are."""
    path = newest_log(run, rank)
    if path is not None:
        return path
    folders = tries(run)
    if not run.exists():
        raise RunError(f"{run} does not exist; `foundling runs list` shows your runs.")
    if not folders:
        raise RunError(f"{run} has no logs yet; they begin with its first `foundling train`.")
    names = sorted(p.stem.removeprefix("rank-") for p in folders[-1].glob("rank-*.log"))
    known = f"{int(names[0])} to {int(names[-1])}" if names else "none"
    raise RunError(f"{run} has no log of rank {rank}; there are ranks {known}.")


def tail(path: Path, size: int = TAIL_BYTES) -> bytes:
    """The last whole lines of a file."""
    with open(path, "rb") as file:
        length = file.seek(0, 2)
        file.seek(max(0, length - size))
        text = file.read()
    return text if length <= size else text.partition(b"\n")[2]


def appended_text(where: Callable[[], Path | None], is_over: Callable[[], bool]) -> Iterator[bytes]:
    """What is added to a file from now on, and to the one that follows it when a job is started
    again, until `is_over` and nothing is left."""
    path, offset = where(), 0
    if path is not None:
        offset = path.stat().st_size
    while True:
        over = is_over()
        current = where()
        if current != path:
            path, offset = current, 0
        if path is not None:
            with open(path, "rb") as file:
                file.seek(offset)
                while text := file.read(1 << 16):
                    offset += len(text)
                    yield text
        if over:
            return
        time.sleep(POLL_S)


class Echo:
    """Show one rank's output while it is written."""

    def __init__(self, path: Path, out: BinaryIO | None = None) -> None:
        self._path, self._out = path, out or sys.stdout.buffer
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._copy, daemon=True, name="echo of rank 0")

    def _copy(self) -> None:
        shown = lambda: self._path if self._path.is_file() else None  # noqa: E731
        # The pipe may be closed: the file has the output all the same.
        with contextlib.suppress(OSError, ValueError):
            for text in appended_text(shown, self._over.is_set):
                self._out.write(text)
                self._out.flush()

    def __enter__(self) -> "Echo":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=10)
