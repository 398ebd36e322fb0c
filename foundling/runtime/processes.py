"""Signals and time limits, polled once a step by the training loop; child processes with limits."""

import contextlib
import ctypes
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

from foundling.config.errors import RunError
from foundling.runtime.console import is_rank_zero
from foundling.runtime.exits import Exit, write_outcome
from foundling.runtime.progress import collective

if TYPE_CHECKING:
    from foundling.runtime.dist import World

# with handle_signals(stop_after=config.train.stop_after):
#     ...                                  # set-up: a signal ends the process at once
#     defer_signals()                      # from here on the loop polls
#     reason = stop_requested(world)       # the same answer on every rank, or None
#     if reason: save, leave the loop, raise EndOfRun(Exit.REQUEUE, reason)
#
# A handler sets a flag and nothing else: it may interrupt an import, or a model that is half
# updated. What has to happen at once is done by a thread, which the interpreter wakes in C even
# while the main thread imports torch or waits for other ranks. One rank with a signal is enough:
# the ranks agree by one small all-reduce on the CPU. SIGTERM and SIGHUP come from people and batch
# systems, SIGUSR1 from SLURM before its limit, SIGINT from Ctrl-C; a second Ctrl-C ends at once.

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
AGREE_TIMEOUT_S = 1800
EARLY = "before the first step of this start"
_PR_SET_PDEATHSIG = 1
# What can be agreed on, as the number that travels; the largest one that any rank has wins.
_REASONS = (None, "the time limit", "SIGUSR1", "SIGHUP", "SIGTERM", "SIGINT")


@dataclass
class _SignalState:
    """The signals that this process has received, and its time limit."""

    deadline: float | None
    leave: Callable[[], None] = lambda: None
    """What is done before the process is ended outside the loop."""
    signal_number: int = 0
    """The received signal as an index into _REASONS; 0: none."""
    is_deferred: bool = False
    """Whether the loop polls for signals; if not, a signal ends the process."""
    group: Any = None
    _interrupts: int = 0

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """A signal handler."""
        self.signal_number = max(self.signal_number, _REASONS.index(signal.Signals(number).name))

    def watch(self, reader: int) -> None:
        """A thread: act on the signals that come as bytes through a pipe, until it is closed."""
        while number := os.read(reader, 1):
            if number[0] in SIGNALS:
                self.on_signal(number[0], None)
                self._interrupts += number[0] == signal.SIGINT
                self.act()

    def act(self) -> None:
        """End the process if signals are not deferred, or if Ctrl-C came a second time."""
        name = _REASONS[self.signal_number]
        if self._interrupts > 1:
            sentence = "interrupted again: ended without a save"
            write_outcome(Exit.INTERRUPTED, sentence)
            _end(self, Exit.INTERRUPTED, sentence)
        elif not self.is_deferred and name == "SIGINT":
            _end(self, Exit.INTERRUPTED, f"interrupted {EARLY}")
        elif not self.is_deferred:
            _end(self, Exit.REQUEUE, f"stopped by {name} {EARLY}")
        elif name == "SIGINT":
            _print_stderr("stopping after this step; Ctrl-C again ends at once, without a save")

    def code(self) -> int:
        late = self.deadline is not None and time.time() >= self.deadline
        return self.signal_number or int(late)


_signals: _SignalState | None = None


def _end(state: _SignalState, code: int, sentence: str) -> None:
    """End the process whatever its main thread does. In set-up no word is left for our launcher,
    which knows the code: torchrun ends ranks in the same way when another one has died."""
    with contextlib.suppress(OSError):
        state.leave()
    _print_stderr(f"foundling: {sentence}")
    os._exit(code)  # as everywhere here: sys.exit ends a thread, and runs what may hang


def _print_stderr(sentence: str) -> None:
    # Not through sys.stderr or rich: the main thread may hold their locks.
    if is_rank_zero():
        with contextlib.suppress(OSError):
            os.write(2, f"{sentence}\n".encode())


@contextlib.contextmanager
def handle_signals(
    stop_after: float = 0, margin: float = 120, leave: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Record signals and watch the time limit while inside; the previous handlers are restored
    afterwards, except in a rank of a job, which then ignores signals. Until `defer_signals`, a
    signal ends the process, after `leave`: with 130 for Ctrl-C and with 75 for the others.

    `stop_after` seconds from now, or `margin` seconds before SLURM's limit, time is up.
    """
    global _signals
    before, outer = {}, _signals
    _signals = state = _SignalState(_deadline(stop_after, margin), leave)
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            stack.enter_context(_signal_thread(state))
            for number in SIGNALS:
                # nohup and --detach ignore SIGHUP on purpose, and that is inherited.
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    before[number] = signal.signal(number, state.on_signal)
            # Our launcher starts ranks with these blocked, so that none is lost before we listen.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            yield
        finally:
            _signals = outer
            if outer is not None:
                outer.is_deferred = True  # what was to be stopped has ended
            # A rank that has agreed to stop may get a second signal, from its own launcher or from
            # SLURM: that must not kill it while it closes.
            if "RANK" in os.environ:
                ignore_all()
            for number, handler in before.items():
                if signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, handler)


@contextlib.contextmanager
def _signal_thread(state: _SignalState) -> Iterator[None]:
    """A thread that receives signals from C: Python's own handlers wait for the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    thread = threading.Thread(target=state.watch, args=(reader,), name="signals", daemon=True)
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
def pause_signal_thread() -> Iterator[None]:
    """While inside, the signal thread does not act: the caller has handlers of its own."""
    before = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)


def ignore_all() -> None:
    """The job has ended and its code is known: no signal may change that any more."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def defer_signals() -> None:
    """From here on a signal is only recorded, because the loop polls `stop_requested`."""
    if _signals is not None:
        _signals.is_deferred = True


@contextlib.contextmanager
def deferring_signals() -> Iterator[None]:
    """While inside, signals are deferred; one that is still pending afterwards ends the process."""
    defer_signals()
    yield
    if _signals is not None:
        _signals.is_deferred = False
        if _signals.signal_number:
            _signals.act()


def stop_requested(world: "World") -> str | None:
    """Why the job should save and end now, or None. Collective: every rank calls it once a step,
    and all get the same answer."""
    if _signals is None:
        return None
    code = _signals.code()
    if world.size > 1:
        code = _agree(_signals, code)
    return _REASONS[code]


def stop_requested_here() -> bool:
    """Whether this process has a signal or has passed its time limit; not collective."""
    return _signals is not None and _signals.code() != 0


class StopAgreement:
    """The stop decision of all ranks, which the loop reads between two steps; it is final."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.reason: str | None = None

    def agreed(self) -> bool:
        """Whether to save and end now; collective, like `stop_requested`."""
        self.reason = self.reason or stop_requested(self._world)
        return self.reason is not None


def _agree(state: _SignalState, code: int) -> int:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    flag = torch.tensor([code], dtype=torch.int32)
    with collective("whether to stop"):
        if state.group is None:
            limit = timedelta(seconds=AGREE_TIMEOUT_S)
            # On the CPU and apart: no GPU waits for this, and it meets no other collective.
            state.group = dist.new_group(backend="gloo", timeout=limit)
            # One rank alone has asked SLURM; work between two steps looks at its own limit.
            earliest = torch.tensor(state.deadline or math.inf, dtype=torch.float64)
            dist.all_reduce(earliest, op=dist.ReduceOp.MIN, group=state.group)
            state.deadline = float(earliest)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=state.group)
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


# Child processes under a time limit: what may hang or die is tried where it can be killed.
#
# A rank that waits in a collective cannot be interrupted from Python, and a kernel that the GPU
# lacks ends its process with SIGILL: neither can be caught from within. Rejected: threads
# with a timeout, which cannot be ended, and torchrun, which takes seconds more and its own view of
# what a failure is.

PARENT = "FOUNDLING_PARENT"
"""Variable with the process id of the parent, with which a child dies."""
LINGER_S = 5.0
"""How long ranks may go on after one of them has failed: they can only notice that it is gone."""
POLL_S = 0.02
LOW_PORTS = range(20_000, 32_000)
"""Below those that Linux gives to connections."""
_OF_A_JOB = ("TORCHELASTIC_", "GROUP_", "ROLE_")


@dataclass(frozen=True)
class ChildResult:
    """How a child ended, and its output."""

    code: int | None
    """Below zero: the signal that ended it; None: it was still there at the limit and killed."""
    out: str
    err: str
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether it ended by itself with code 0."""
        return self.code == 0

    @property
    def reason(self) -> str:
        """How it ended, in a few words, with the last line of its stderr."""
        if self.code is None:
            return f"no answer within {self.seconds:.0f} s"
        if self.code < 0:
            return f"killed by {signal.Signals(-self.code).name}"
        said = [line.strip() for line in self.err.splitlines() if line.strip()]
        return said[-1][:300] if said else f"exit code {self.code}"


def run_child(
    args: Sequence[str],
    *,
    limit_s: float,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    output_extends_limit: bool = False,
) -> ChildResult:
    """Run `python ARGS` with `stdin` as its input, for at most `limit_s` seconds; where
    `output_extends_limit`, for as long as it prints something within each `limit_s`."""
    return _run([dict(env or {})], args, limit_s, stdin, output_extends_limit)[0]


def run_ranks(
    args: Sequence[str],
    processes: int,
    *,
    limit_s: float,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
) -> list[ChildResult]:
    """Run `python ARGS` as the ranks of a job on this machine; by rank, how they ended."""
    port = str(free_port())
    each = [
        {**(env or {}), **rank_variables(rank, processes, "127.0.0.1", port)}
        for rank in range(processes)
    ]
    return _run(each, args, limit_s, stdin)


def rank_variables(rank: int, processes: int, address: str, port: str) -> dict[str, str]:
    """What torch reads to find the others of a job on one machine."""
    number, size = str(rank), str(processes)
    return {
        "RANK": number,
        "LOCAL_RANK": number,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }


def free_port() -> int:
    """A free port, outside the range from which Linux picks ports for connections: another process
    could get it before ours listens."""
    for port in random.SystemRandom().sample(LOW_PORTS, 100):
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("", port))
            return port
    raise RunError(f"no port from {LOW_PORTS.start} to {LOW_PORTS.stop} is free on this machine.")


def tie_to_parent() -> None:
    """Called first by a child: it dies with the process that started it."""
    if PARENT in os.environ:
        die_with_parent(int(os.environ[PARENT]))


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    out: IO[bytes]
    err: IO[bytes]
    began: float
    ended: float = 0.0

    def kill(self) -> None:
        """The child and what it has started; one that a dead disk holds is not waited for long."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=LINGER_S)


def _run(
    each: Sequence[Mapping[str, str]],
    args: Sequence[str],
    limit_s: float,
    stdin: str,
    output_extends_limit: bool = False,
) -> list[ChildResult]:
    with contextlib.ExitStack() as stack:
        children = [_start(stack, env, args, stdin) for env in each]
        for child in children:
            stack.callback(child.kill)
        _wait(children, limit_s, output_extends_limit)
        late = [child.process.poll() is None for child in children]
        for child in children:
            child.kill()
        return [
            _outcome(child, is_late=is_late, limit_s=limit_s)
            for child, is_late in zip(children, late, strict=True)
        ]


def _start(
    stack: contextlib.ExitStack, env: Mapping[str, str], args: Sequence[str], stdin: str
) -> _Child:
    # Files and not pipes: a child that writes much would wait for us while we wait for it.
    files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]  # noqa: SIM115
    files[0].write(stdin.encode())
    files[0].seek(0)
    around = {k: v for k, v in os.environ.items() if not k.startswith(_OF_A_JOB)}
    process = subprocess.Popen(
        [sys.executable, *args],
        stdin=files[0],
        stdout=files[1],
        stderr=files[2],
        env={**around, **env, PARENT: str(os.getpid())},
        start_new_session=True,
    )
    return _Child(process, files[1], files[2], time.monotonic())


def _wait(children: Sequence[_Child], limit_s: float, output_extends_limit: bool) -> None:
    """Until all have ended, or the limit is over, or one has failed and the others lingered."""
    last, said = time.monotonic() + limit_s, 0
    while any(child.process.poll() is None for child in children):
        now = time.monotonic()
        for child in children:
            if child.process.poll() is not None and not child.ended:
                child.ended = now
        if any(child.process.poll() for child in children):
            last = min(last, now + LINGER_S)
        elif output_extends_limit and (
            size := sum(os.fstat(child.out.fileno()).st_size for child in children)
        ):
            last, said = (now + limit_s, size) if size > said else (last, said)
        if now > last:
            return
        time.sleep(POLL_S)


def _outcome(child: _Child, *, is_late: bool, limit_s: float) -> ChildResult:
    texts = []
    for file in (child.out, child.err):
        file.seek(0)
        texts.append(file.read().decode(errors="replace"))
    seconds = (child.ended or time.monotonic()) - child.began
    code = None if is_late else child.process.returncode
    return ChildResult(code, texts[0], texts[1], limit_s if is_late else seconds)
