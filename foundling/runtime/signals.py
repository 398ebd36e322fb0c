"""Being told to stop: signals and time limits become a question that the loop asks once a step.

    with listening(stop_after=config.train.stop_after, margin=config.train.stop_margin):
        ...
        reason = stop_requested(world)      # the same answer on every rank, or None
        if reason:
            save, leave the loop, raise EndOfRun(Exit.REQUEUE, reason)

A handler only notes the signal: nothing is saved inside it, where the model may be half updated.
One rank that was told is enough, the ranks agree by one small all-reduce on the CPU. SIGTERM and
SIGHUP come from people and batch systems, SIGUSR1 from SLURM before its limit, SIGINT from Ctrl-C;
a second Ctrl-C ends at once.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from foundling.runtime.log import is_rank_zero, say
from foundling.runtime.pulse import collective

if TYPE_CHECKING:
    from foundling.runtime.dist import World

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
AGREE_TIMEOUT_S = 1800
_PR_SET_PDEATHSIG = 1
# What can be agreed on, as the number that travels; the largest one that any rank has wins.
_REASONS = (None, "the time limit", "SIGUSR1", "SIGHUP", "SIGTERM", "SIGINT")


@dataclass
class _Ear:
    """What this process was told."""

    deadline: float | None
    told: int = 0
    group: Any = None

    def hear(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT and self.told == _REASONS.index("SIGINT"):
            raise KeyboardInterrupt
        self.told = max(self.told, _REASONS.index(name))
        if number == signal.SIGINT:
            say("stopping after this step; Ctrl-C again ends at once, without a save")

    def code(self) -> int:
        late = self.deadline is not None and time.time() >= self.deadline
        return self.told or int(late)


_ear: _Ear | None = None


@contextlib.contextmanager
def listening(stop_after: float = 0, margin: float = 120) -> Iterator[None]:
    """Note signals and watch the clock while inside; the handlers before are put back after, except
    that a rank of a job hears no more of them.

    `stop_after` seconds from now, or `margin` seconds before SLURM's limit, time is up.
    """
    global _ear
    before = {}
    _ear = _Ear(_deadline(stop_after, margin))
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            # nohup and --detach ignore SIGHUP on purpose, and that is inherited.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, _ear.hear)
        # Our launcher starts ranks with these blocked, so that none is lost before we listen.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        yield
    finally:
        _ear = None
        # A rank that has agreed to stop may be told a second time, by its own launcher or by SLURM:
        # that must not kill it while it closes.
        is_rank = "RANK" in os.environ
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if is_rank else handler)


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
