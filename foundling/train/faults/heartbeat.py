"""Heartbeat of a rank: what it does, its last collective, and stacks on request."""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from foundling.runtime.progress import EnteredCollective, ProgressMarker

FINISHED = "finished"


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """Where one rank stands."""

    rank: int
    host: str
    pid: int
    started_at: str
    """When the process began, in its kernel's count."""
    number: int
    """Beats so far: it changes as long as the process lives."""
    step: int
    phase: str
    stall_s: float
    inside: EnteredCollective | None
    """The collective it is in."""
    entered: tuple[EnteredCollective, ...]
    """The last collectives it entered, this one included."""
    stack: tuple[str, ...]
    """The main thread's Python frames, the innermost last."""
    ended: str = ""
    """How the process left, in its own words; empty while it is there, or if it was killed."""

    def place(self) -> str:
        """In words."""
        where = f"in phase '{self.phase}' of step {self.step + 1}"
        if self.inside is not None:
            return f"{where}, inside {collective_in_words(self.inside)}"
        last = f", last collective {collective_in_words(self.entered[-1])}" if self.entered else ""
        return f"{where}, in no collective{last}"


def take_heartbeat(
    rank: int, number: int, progress: ProgressMarker, ended: str = "", stack: Any = None
) -> Heartbeat:
    """This process's own."""
    return Heartbeat(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        started_at=process_start(os.getpid()),
        number=number,
        step=progress.step,
        phase=progress.phase,
        stall_s=round(progress.stall_s(), 3),
        inside=progress.inside,
        entered=tuple(progress.entered),
        stack=tuple(main_stack() if stack is None else stack),
        ended=ended,
    )


def heartbeat_path(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"rank-{rank:05d}.json"


def write_heartbeat(folder: Path, beat: Heartbeat) -> None:
    """Replace the rank's file; not forced to the disk, which would be a load on a shared one."""
    path = heartbeat_path(folder, beat.rank)
    temporary = path.with_suffix(f".tmp-{beat.pid}")
    temporary.write_text(json.dumps(asdict(beat)))
    os.replace(temporary, path)


def read_heartbeat(path: Path) -> Heartbeat | None:
    """A rank's file; None where there is none, or one of another version."""
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        inside, entered, stack = (data.pop(name) for name in ("inside", "entered", "stack"))
        return Heartbeat(
            **data,
            inside=EnteredCollective(**inside) if inside else None,
            entered=tuple(EnteredCollective(**one) for one in entered),
            stack=tuple(stack),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_gone(beat: Heartbeat) -> bool:
    """Whether the process of a beat of this machine is no more (or only its name is)."""
    return process_state(beat.pid) in ("", "Z") or process_start(beat.pid) != beat.started_at


def collective_in_words(entered: EnteredCollective) -> str:
    """A collective in words."""
    return f"'{entered.name}' (number {entered.number}, step {entered.step + 1})"


# Where a process stands: the Python stack of its main thread, and of every thread to a file.
#
# faulthandler writes without taking the interpreter's lock, so that SIGUSR2 makes even a process
# that holds it for ever tell where it is. Rejected: py-spy and gdb, which are not there when one
# needs them.

DEPTH = 40


def main_stack() -> list[str]:
    """The main thread's Python frames, the innermost last: `file:line function`. By hand, because
    traceback looks at the source files, and a disk may be what hangs."""
    # The documented way to another thread's frames, in spite of its name.
    frame = sys._current_frames().get(threading.main_thread().ident or -1)
    found: list[str] = []
    while frame is not None and len(found) < DEPTH:
        code = frame.f_code
        found.append(f"{_short(code.co_filename)}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return found[::-1]


def stack_of(error: BaseException) -> list[str]:
    """The frames of an exception, the innermost last."""
    found = traceback.extract_tb(error.__traceback__)
    return [f"{_short(f.filename)}:{f.lineno} {f.name}" for f in found][-DEPTH:]


def _short(name: str) -> str:
    """The last three parts of a path say which file it is."""
    return "/".join(Path(name).parts[-3:])


def dump_threads(path: Path) -> None:
    """Add the stack of every thread of this process to a file."""
    with contextlib.suppress(OSError), open(path, "a") as file:
        faulthandler.dump_traceback(file, all_threads=True)


@contextlib.contextmanager
def dump_stacks_on_signal(path: Path) -> Iterator[TextIO]:
    """While inside, SIGUSR2 and a crash (SIGSEGV, SIGABRT and the like) write every thread's stack
    to `path`; the open file is handed out."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
        # What is put back afterwards must not be death: a peer may just be asking.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    was_enabled = faulthandler.is_enabled()
    with open(path, "w") as file:
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
        if not was_enabled:
            faulthandler.enable(file=file, all_threads=True)
        try:
            yield file
        finally:
            faulthandler.unregister(signal.SIGUSR2)
            if not was_enabled:
                faulthandler.disable()


def request_stacks(pid: int) -> None:
    """Make another process of this machine, inside `dump_stacks_on_signal`, write its stacks."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGUSR2)


def process_state(pid: int) -> str:
    """One letter of Linux's: R running, S sleeping, D waiting for a device, T stopped, Z dead; the
    empty string where there is no such process, or no way to tell."""
    return _stat(pid)[0]


def process_start(pid: int) -> str:
    """When a process began, in the kernel's own count: with its number, its identity."""
    return _stat(pid)[1]


def _stat(pid: int) -> tuple[str, str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", ""
    fields = text.rpartition(")")[2].split()  # a program's name may hold spaces and brackets
    return fields[0], fields[19]
