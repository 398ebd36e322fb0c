"""Being told to stop: signals and time limits become a question that the loop asks once a step.

    with listening(stop_after=config.train.stop_after, margin=config.train.stop_margin):
        ...                                 # set-up: a signal ends the process at once
        heed()                              # from here on the loop asks
        reason = stop_requested(world)      # the same answer on every rank, or None
        if reason:
            save, leave the loop, raise EndOfRun(Exit.REQUEUE, reason)

A handler sets a flag and nothing else: it may interrupt an import, or a model that is half updated.
What has to happen at once is done by a thread, which the interpreter wakes in C even while the main
thread imports torch or waits for other ranks. One rank that was told is enough, the ranks agree by
one small all-reduce on the CPU. SIGTERM and SIGHUP come from people and batch systems, SIGUSR1 from
SLURM before its limit, SIGINT from Ctrl-C; a second Ctrl-C ends at once.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from foundling.runtime.exits import Exit, write_outcome
from foundling.runtime.log import is_rank_zero
from foundling.runtime.pulse import collective

if TYPE_CHECKING:
    from foundling.runtime.dist import World

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
AGREE_TIMEOUT_S = 1800
EARLY = "before the first step of this start"
_PR_SET_PDEATHSIG = 1
# What can be agreed on, as the number that travels; the largest one that any rank has wins.
_REASONS = (None, "the time limit", "SIGUSR1", "SIGHUP", "SIGTERM", "SIGINT")


@dataclass
class _Ear:
    """What this process was told."""

    deadline: float | None
    leave: Callable[[], None] = lambda: None
    """What is done before the process is ended outside the loop."""
    told: int = 0
    is_heeded: bool = False
    """Whether somebody asks: until then a signal ends the process."""
    group: Any = None
    _interrupts: int = 0

    def hear(self, number: int, frame: FrameType | None) -> None:
        """A signal handler."""
        self.told = max(self.told, _REASONS.index(signal.Signals(number).name))

    def watch(self, reader: int) -> None:
        """A thread: act on the signals that come as bytes through a pipe, until it is closed."""
        while number := os.read(reader, 1):
            if number[0] in SIGNALS:
                self.hear(number[0], None)
                self._interrupts += number[0] == signal.SIGINT
                self.act()

    def act(self) -> None:
        """End the process if nobody asks, or if Ctrl-C came a second time."""
        name = _REASONS[self.told]
        if self._interrupts > 1:
            sentence = "interrupted again: ended without a save"
            write_outcome(Exit.INTERRUPTED, sentence)
            _end(self, Exit.INTERRUPTED, sentence)
        elif not self.is_heeded and name == "SIGINT":
            _end(self, Exit.INTERRUPTED, f"interrupted {EARLY}")
        elif not self.is_heeded:
            _end(self, Exit.REQUEUE, f"stopped by {name} {EARLY}")
        elif name == "SIGINT":
            _tell("stopping after this step; Ctrl-C again ends at once, without a save")

    def code(self) -> int:
        late = self.deadline is not None and time.time() >= self.deadline
        return self.told or int(late)


_ear: _Ear | None = None


def _end(ear: _Ear, code: int, sentence: str) -> None:
    """End the process whatever its main thread does. In set-up no word is left for our launcher,
    which knows the code: torchrun ends ranks in the same way when another one has died."""
    with contextlib.suppress(OSError):
        ear.leave()
    _tell(f"foundling: {sentence}")
    os._exit(code)


def _tell(sentence: str) -> None:
    # Not through sys.stderr or rich: the main thread may hold their locks.
    if is_rank_zero():
        with contextlib.suppress(OSError):
            os.write(2, f"{sentence}\n".encode())


@contextlib.contextmanager
def listening(
    stop_after: float = 0, margin: float = 120, leave: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Note signals and watch the clock while inside; the handlers before are put back after, except
    that a rank of a job hears no more of them. Until `heed`, a signal ends the process, after
    `leave`: with 130 for Ctrl-C and with 75 for the others.

    `stop_after` seconds from now, or `margin` seconds before SLURM's limit, time is up.
    """
    global _ear
    before, outer = {}, _ear
    _ear = ear = _Ear(_deadline(stop_after, margin), leave)
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            stack.enter_context(_woken(ear))
            for number in SIGNALS:
                # nohup and --detach ignore SIGHUP on purpose, and that is inherited.
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    before[number] = signal.signal(number, ear.hear)
            # Our launcher starts ranks with these blocked, so that none is lost before we listen.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            yield
        finally:
            _ear = outer
            if outer is not None:
                outer.is_heeded = True  # what was to be stopped has ended
            # A rank that has agreed to stop may be told a second time, by its own launcher or by
            # SLURM: that must not kill it while it closes.
            if "RANK" in os.environ:
                ignore_all()
            for number, handler in before.items():
                if signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, handler)


@contextlib.contextmanager
def _woken(ear: _Ear) -> Iterator[None]:
    """A thread that hears of signals from C: python's own handlers wait for the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    thread = threading.Thread(target=ear.watch, args=(reader,), name="signals", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        os.close(writer)
        thread.join()
        os.close(reader)


@contextlib.contextmanager
def unwoken() -> Iterator[None]:
    """While inside, nothing happens at once: whoever asks has handlers of its own."""
    before = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)


def ignore_all() -> None:
    """The job has ended and its code is known: no signal may change that any more."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def heed() -> None:
    """From here on the loop asks: a signal is only noted."""
    if _ear is not None:
        _ear.is_heeded = True


@contextlib.contextmanager
def heeding() -> Iterator[None]:
    """While inside, somebody asks; what was not asked about by the end of it counts afterwards."""
    heed()
    yield
    if _ear is not None:
        _ear.is_heeded = False
        if _ear.told:
            _ear.act()


def stop_requested(world: "World") -> str | None:
    """Why the job should save and end now, or None. Collective: every rank asks once a step, and
    all get the same answer."""
    if _ear is None:
        return None
    code = _ear.code()
    if world.size > 1:
        code = _agree(_ear, code)
    return _REASONS[code]


def is_told() -> bool:
    """Whether this process was told to stop, as far as it knows itself: no collective."""
    return _ear is not None and _ear.code() != 0


class StopSign:
    """What the loop looks at between two steps; once it has said stop, it stays so."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.reason: str | None = None

    def is_up(self) -> bool:
        """Whether to save and end now; collective, like `stop_requested`."""
        self.reason = self.reason or stop_requested(self._world)
        return self.reason is not None


def _agree(ear: _Ear, code: int) -> int:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    flag = torch.tensor([code], dtype=torch.int32)
    with collective("whether to stop"):
        if ear.group is None:
            limit = timedelta(seconds=AGREE_TIMEOUT_S)
            # On the CPU and apart: no GPU waits for this, and it meets no other collective.
            ear.group = dist.new_group(backend="gloo", timeout=limit)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=ear.group)
    return int(flag.item())


def _deadline(stop_after: float, margin: float) -> float | None:
    """The time of day at which to stop, whichever limit comes first."""
    limits = [time.time() + stop_after] if stop_after > 0 else []
    # One rank asks for all: thousands at once would bring SLURM's controller down.
    end = slurm_end() if is_rank_zero() else None
    if end is not None:
        # A job that is shorter than the margin should still get something done.
        limits.append(max(end - margin, time.time() + (end - time.time()) / 2))
    return min(limits, default=None)


def slurm_end() -> float | None:
    """When SLURM will end the job around us, as a time of day; None if there is none to be had."""
    if end := os.environ.get("SLURM_JOB_END_TIME"):
        return float(end)
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return None
    command = ["squeue", "--noheader", "--jobs", job, "--format", "%e"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return time.mktime(time.strptime(done.stdout.strip(), "%Y-%m-%dT%H:%M:%S"))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def die_with_parent(parent: int) -> None:
    """Be killed when the process `parent`, which started us, is gone.

    Linux does it; elsewhere a thread looks every second. A kill -9 of torchrun otherwise leaves its
    ranks training and saving.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True, name="parent watch").start()
    if os.getppid() != parent:  # it went before we asked
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
