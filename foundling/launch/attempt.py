"""One try of a job on this machine: torchrun and its ranks, from their start to their end.

The launcher and not torchrun tells the ranks to stop, waits for them and decides what their end
means. A rank that ends for a reason of its own leaves word (runtime/exits.py); a rank that cannot,
because it was killed, is found in torchrun's log.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from foundling.launch.environment import COMMAND, NODE, LaunchEnvironment, host
from foundling.launch.logs import ranks_file, wait_until
from foundling.runtime.exits import GOOD, OUTCOMES, Exit, RankOutcome, read_outcomes, verdict
from foundling.runtime.files import DISK_FULL, full_disk_sentence
from foundling.runtime.lock import TOKEN
from foundling.runtime.processes import EARLY

LINGER_S = 15.0
"""How long the rest of a job may go on after a rank has said that no other try would help."""
POLL_S = 0.5
ROOM = 1 << 14
"""Bytes that a try needs at least, for its logs."""
FAILED = "failed"
"""File by which a node tells the others that a try is over."""
JOIN_S = 600
"""How long nodes wait for each other at the start of a try."""

_FIRST = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
_LISTED = re.compile(
    r"time *: (\S+)\n.*\n *rank *: \d+ \(local_rank: (\d+)\)\n *exitcode *: (-?\d+) \(pid: (\d+)\)"
)
TOGETHER_S = 5.0
"""Ranks that torchrun found dead within so long died by themselves; it kills others much later."""


@dataclass
class LauncherSignal:
    """The signals that the launcher itself receives while it waits."""

    signal: int = 0
    at: float = 0.0
    times: int = 0

    def note(self, number: int, frame: object) -> None:
        """A signal handler."""
        self.times += 1
        if not self.signal:
            self.signal, self.at = number, time.monotonic()


@dataclass(frozen=True)
class Attempt:
    """What one try needs to know."""

    folder: Path
    """RUN/logs/LAUNCH/try-N, seen by every node."""
    number: int
    processes: int
    place: LaunchEnvironment
    token: str
    command: tuple[str, ...]
    """Module and arguments of every rank."""
    grace_s: float

    @property
    def agent_log(self) -> Path:
        return self.folder / f"agent-{host()}-{self.place.node}.log"

    def mark_failed(self) -> None:
        """Tell the other nodes that this try is over: one file for all, which costs one look."""
        (self.folder / FAILED).touch()

    @property
    def has_failed(self) -> bool:
        """Whether some node has said so."""
        return (self.folder / FAILED).exists()

    def ranks(self) -> dict[int, int]:
        """Process numbers of this machine's ranks, as they have left them so far."""
        found = {}
        with contextlib.suppress(OSError):
            for line in ranks_file(self.folder, self.place.node).read_text().splitlines():
                words = line.split()
                if len(words) == 3:
                    found[int(words[0])] = int(words[1])
        return found

    def said(self) -> dict[int, RankOutcome]:
        """What this machine's ranks have said, and rank 0, whose word decides."""
        return read_outcomes(self.folder, {0, *self.ranks()})


@dataclass
class _Watch:
    """The state of waiting for one try."""

    attempt: Attempt
    agent: subprocess.Popen[bytes]
    asked: LauncherSignal
    signalled: set[int] = field(default_factory=set)
    ending_at: float = 0.0
    was_early: bool = False
    """Whether the signal came before any rank could get it."""
    was_killed: bool = False


def run_attempt(attempt: Attempt, asked: LauncherSignal) -> RankOutcome:
    """Start this machine's ranks, see them to their end, and say how the try ended."""
    with open(attempt.agent_log, "ab") as log:
        agent = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "foundling.launch.agent",
                str(os.getpid()),
                *_torchrun_arguments(attempt),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(attempt),
            start_new_session=True,
        )
    watch = _Watch(attempt, agent, asked)
    try:
        while agent.poll() is None:
            _poll(watch)
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(POLL_S)
    finally:
        _kill(watch)
    return _outcome(watch)


def _torchrun_arguments(attempt: Attempt) -> list[str]:
    """torchrun's arguments. It never restarts anything: the launcher does, with a fresh store."""
    words = ["--nproc-per-node", str(attempt.processes), "--max-restarts", "0"]
    place = attempt.place
    if place.nodes == 1:
        # Pods often cannot resolve their own name.
        words += ["--standalone", "--nnodes", "1", "--local-addr", "localhost"]
    else:
        is_host = "1" if place.is_head else "0"
        words += ["--nnodes", str(place.nodes), "--rdzv-backend", "c10d"]
        words += ["--rdzv-id", f"{place.name}-{attempt.number}"]
        words += ["--rdzv-endpoint", f"{place.head}:{place.port + attempt.number % 50}"]
        words += ["--rdzv-conf", f"is_host={is_host},join_timeout={JOIN_S}"]
    return [*words, "-m", "foundling.launch.worker"]


def _environment(attempt: Attempt) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    ours = {
        OUTCOMES: str(attempt.folder.resolve()),
        COMMAND: json.dumps(attempt.command),
        TOKEN: attempt.token,
        NODE: str(attempt.place.node),
        # Keys of an earlier life in a shared store make a restarted gloo job hang.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    threads = str(max(1, cores // attempt.processes))
    return {"OMP_NUM_THREADS": threads, **os.environ, **ours}


def _poll(watch: _Watch) -> None:
    """One look at the try: pass signals on, and end what would not end by itself."""
    now, attempt, asked = time.monotonic(), watch.attempt, watch.asked
    if asked.signal:
        pids = _local_ranks(watch)
        for pid in pids - watch.signalled:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, asked.signal)
            watch.signalled.add(pid)
        if not watch.signalled and not attempt.ranks():
            watch.was_early = True  # no rank has begun
            watch.agent.kill()
        overdue = now - asked.at > attempt.grace_s
        if overdue or (asked.times > 1 and asked.signal == signal.SIGINT):
            watch.was_killed = True
            _kill(watch)
        return
    said = verdict(attempt.said())
    if said is not None and said.is_final and said.code not in GOOD:
        attempt.mark_failed()
    if attempt.has_failed:
        watch.ending_at = watch.ending_at or now + LINGER_S
        if now > watch.ending_at:
            _kill(watch)


def _local_ranks(watch: _Watch) -> set[int]:
    """Process numbers of this machine's ranks, as they left them; a number that torchrun does not
    own id is another process's by now, or another machine's."""
    pids = watch.attempt.ranks().values()
    return {pid for pid in pids if _parent_of(pid) == watch.agent.pid}


def _parent_of(pid: int) -> int | None:
    try:
        # The name of a program may hold spaces and brackets; the numbers come after the last one.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):  # the latter: it ended between open and read
        if Path("/proc/self/stat").exists():
            return None
    done = subprocess.run(["ps", "-o", "ppid=", "-p", str(pid)], capture_output=True, text=True)
    return int(done.stdout) if done.stdout.strip() else None


def _kill(watch: _Watch) -> None:
    """End torchrun; its ranks die with it, and this waits until they have."""
    ranks = _local_ranks(watch) if watch.agent.poll() is None else set()
    if watch.agent.poll() is None:
        watch.agent.kill()
        watch.agent.wait()
    wait_until(lambda: all(_parent_of(pid) is None for pid in ranks), LINGER_S, 0.02)


def _outcome(watch: _Watch) -> RankOutcome:
    attempt, asked = watch.attempt, watch.asked
    said = verdict(attempt.said())
    if said is not None and said.is_final:
        return said
    if not watch.was_killed and (code := _stopped_early(watch)):
        by = signal.Signals(asked.signal).name if asked.signal else "a signal"
        return _here(code, f"stopped by {by} {EARLY}")
    if (said is None or said.code not in GOOD) and (full := _no_room(attempt.folder)):
        return _here(Exit.UNSAVED, full)  # some could leave no word, others lost those
    if not watch.was_killed and (killed := killed_rank(attempt)):
        name, rank, pid = killed  # the others have only noticed that it was gone
        return _here(
            Exit.CRASH, f"local rank {rank} (process {pid}) on {host()} was killed by {name}"
        )
    if said is not None and not watch.was_killed:
        return said
    if watch.was_killed and asked.times > 1 and asked.signal == signal.SIGINT:
        return _here(Exit.INTERRUPTED, "interrupted twice: nothing was saved after the first")
    if watch.was_killed:
        sentence = f"did not end within {attempt.grace_s:g} s and was killed"
        return _here(Exit.KILLED, f"{sentence}; the last completed save stands")
    if watch.agent.returncode < 0:
        name = signal.Signals(-watch.agent.returncode).name
        return _here(Exit.CRASH, f"torchrun (process {watch.agent.pid}) was killed by {name}")
    return _here(Exit.CRASH, _last_line(attempt) or "ended without saying why")


def _stopped_early(watch: _Watch) -> Exit | None:
    """The code of a try whose ranks were stopped by a signal before they asked for any; None if it
    was not. Without a signal of the launcher's own, all must have: torchrun stops the others when
    one has died of something else."""
    codes = {code for code, *_ in _found_ended(_log(watch.attempt))}
    early = codes & {Exit.REQUEUE, Exit.INTERRUPTED}
    if not (watch.was_early or early) or (not watch.asked.signal and early != codes):
        return None
    is_ctrl_c = watch.asked.signal == signal.SIGINT or Exit.INTERRUPTED in codes
    is_first = watch.attempt.number == 0  # what was begun by an earlier try is saved
    return Exit.INTERRUPTED if is_ctrl_c and is_first else Exit.REQUEUE


def _no_room(folder: Path) -> str:
    """What the disk of `folder` says when it takes no more; empty if it does."""
    probe = folder / f"room-{host()}"
    try:
        probe.write_bytes(bytes(ROOM))
    except OSError as error:
        return full_disk_sentence(error, folder) if error.errno in DISK_FULL else ""
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return ""


def _here(code: Exit, sentence: str) -> RankOutcome:
    return RankOutcome(rank=-1, code=code, sentence=sentence, host=host(), pid=os.getpid())


def killed_rank(attempt: Attempt) -> tuple[str, int, int] | None:
    """Signal, local rank and process of a rank of this machine that was killed, by torchrun's log;
    torchrun itself ends the others by SIGTERM."""
    for code, rank, pid in _found_ended(_log(attempt)):
        if code < 0 and code != -signal.SIGTERM:
            return signal.Signals(-code).name, rank, pid
    return None


def _found_ended(log: str) -> list[tuple[int, int, int]]:
    """Code, local rank and process of the ranks that ended by themselves, by torchrun's log. It
    calls the first that it looked at the first failure, which on a busy machine is often one that
    fell later."""
    ends = [
        (datetime.fromisoformat(when.replace("_", "T")).timestamp(), int(code), int(rank), int(pid))
        for when, rank, code, pid in _LISTED.findall(log)
    ]
    last = min((when for when, *_ in ends), default=0.0) + TOGETHER_S
    first = [(int(code), int(rank), int(pid)) for code, rank, pid in _FIRST.findall(log)[:1]]
    return first + [(code, rank, pid) for when, code, rank, pid in ends if when < last]


def _last_line(attempt: Attempt) -> str:
    lines = [line for line in _log(attempt).splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else ""


def _log(attempt: Attempt) -> str:
    return attempt.agent_log.read_text(errors="replace")
