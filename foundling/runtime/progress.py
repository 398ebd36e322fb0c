"""ProgressMarker: the step, the phase and the last collectives of this process.

One marker a process, updated by plain assignments in the main thread and read by the watchdog's
thread. It is global because collectives are called deep inside rooms that get no run objects.
Every rank must enter the same collectives in the same order; the numbers and names kept here show
which rank did not.

    with collective("loss"):
        dist.all_reduce(tensor)
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KEPT = 64
"""Collectives remembered: enough for several steps."""
SLOW_PHASES = ("start", "first step", "save", "evaluate", "roll back")
"""What may take longer than a step."""
SAVE_PHASES = ("save", "roll back")
"""Of these, what waits for a save."""
WAITING = "wait for data"
"""A phase that may take any time: a build that is followed has not got its next shard yet."""


@dataclass(frozen=True)
class EnteredCollective:
    """A collective that was entered."""

    number: int
    """Counted from the beginning of the process."""
    name: str
    step: int


class ProgressMarker:
    """Step, phase and collectives of the main thread, which any thread may read."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """As at the beginning of a process."""
        self.step = 0
        self.phase = "start"
        self.moved_at = time.monotonic()
        self.entered: deque[EnteredCollective] = deque(maxlen=KEPT)
        self._inside: tuple[EnteredCollective, ...] = ()
        self._count = 0

    @property
    def inside(self) -> EnteredCollective | None:
        """The collective that the main thread is in, the innermost of several."""
        found = self._inside
        return found[-1] if found else None

    def stall_s(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self.moved_at

    def move(self, phase: str, step: int | None = None) -> None:
        """Record progress: a new phase, or a new step of the same phase."""
        if step is not None:
            self.step = step
        self.phase = phase
        self._inside = ()
        self.moved_at = time.monotonic()

    def next_step(self, step: int) -> None:
        """A step begins; the first one of a process may compile, and take long."""
        self.move("first step" if self.phase == "start" else "step", step)

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A phase with a beginning and an end; afterwards the previous phase is set again."""
        before = self.phase
        self.move(phase)
        try:
            yield
        finally:
            self.move(before)

    @contextlib.contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Around a call that every rank must make. Those of other threads are not counted: they
        have groups of their own and come at any time."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        outside = self._inside
        self._count += 1
        one = EnteredCollective(self._count, name, self.step)
        self._inside = (*outside, one)
        self.entered.append(one)
        # Not in a `finally`: a rank that left by an error is shown inside until it moves on.
        yield
        self._inside = outside


PROGRESS = ProgressMarker()
collective = PROGRESS.collective


def process_age() -> float:
    """Seconds since the operating system started this process."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except OSError:  # not Linux
        return time.process_time()
