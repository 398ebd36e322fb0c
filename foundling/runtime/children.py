"""Child processes under a time limit: what may hang or die is tried where it can be killed.

A rank that waits in a collective holds no Python lock that could be asked for, and a kernel that
does not exist ends its process with SIGILL: neither can be caught from within. Rejected: threads
with a timeout, which cannot be ended, and torchrun, which takes seconds more and its own view of
what a failure is.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from foundling.config.errors import RunError
from foundling.runtime.signals import die_with_parent

PARENT = "FOUNDLING_PARENT"
"""Variable by which a child knows whose end is its own."""
LINGER_S = 5.0
"""How long ranks may go on after one of them has failed: they can only notice that it is gone."""
POLL_S = 0.02
LOW_PORTS = range(20_000, 32_000)
"""Below those that Linux gives to connections."""
_OF_A_JOB = ("TORCHELASTIC_", "GROUP_", "ROLE_")


@dataclass(frozen=True)
class Ended:
    """How a child ended, and what it said."""

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
        """How it ended, in a few words, with the last that it said about it."""
        if self.code is None:
            return f"no answer within {self.seconds:.0f} s"
        if self.code < 0:
            return f"killed by {signal.Signals(-self.code).name}"
        said = [line.strip() for line in self.err.splitlines() if line.strip()]
        return said[-1][:300] if said else f"exit code {self.code}"


def run_child(
    words: Sequence[str],
    *,
    limit_s: float,
    env: Mapping[str, str] | None = None,
    given: str = "",
    talks: bool = False,
) -> Ended:
    """Run `python WORDS` with `given` as its standard input, for at most `limit_s` seconds; of a
    child that `talks`, for as long as it says something within each `limit_s`."""
    return _run([dict(env or {})], words, limit_s, given, talks)[0]


def run_ranks(
    words: Sequence[str],
    processes: int,
    *,
    limit_s: float,
    env: Mapping[str, str] | None = None,
    given: str = "",
) -> list[Ended]:
    """Run `python WORDS` as the ranks of a job on this machine; by rank, how they ended."""
    port = str(free_port())
    each = [
        {**(env or {}), **rank_variables(rank, processes, "127.0.0.1", port)}
        for rank in range(processes)
    ]
    return _run(each, words, limit_s, given)


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
    """A port that nobody has. Of those that Linux gives out by itself, another process may have it
    for a connection of its own before ours listens."""
    for port in random.SystemRandom().sample(LOW_PORTS, 100):
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("", port))
            return port
    raise RunError(f"no port from {LOW_PORTS.start} to {LOW_PORTS.stop} is free on this machine.")


def tie_to_parent() -> None:
    """Called first by a child: it dies with whoever started it."""
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
    words: Sequence[str],
    limit_s: float,
    given: str,
    talks: bool = False,
) -> list[Ended]:
    with contextlib.ExitStack() as stack:
        children = [_start(stack, env, words, given) for env in each]
        for child in children:
            stack.callback(child.kill)
        _wait(children, limit_s, talks)
        late = [child.process.poll() is None for child in children]
        for child in children:
            child.kill()
        return [
            _told(child, is_late=is_late, limit_s=limit_s)
            for child, is_late in zip(children, late, strict=True)
        ]


def _start(
    stack: contextlib.ExitStack, env: Mapping[str, str], words: Sequence[str], given: str
) -> _Child:
    # Files and not pipes: a child that writes much would wait for us while we wait for it.
    files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]  # noqa: SIM115
    files[0].write(given.encode())
    files[0].seek(0)
    around = {k: v for k, v in os.environ.items() if not k.startswith(_OF_A_JOB)}
    process = subprocess.Popen(
        [sys.executable, *words],
        stdin=files[0],
        stdout=files[1],
        stderr=files[2],
        env={**around, **env, PARENT: str(os.getpid())},
        start_new_session=True,
    )
    return _Child(process, files[1], files[2], time.monotonic())


def _wait(children: Sequence[_Child], limit_s: float, talks: bool) -> None:
    """Until all have ended, or the limit is over, or one has failed and the others lingered."""
    last, said = time.monotonic() + limit_s, 0
    while any(child.process.poll() is None for child in children):
        now = time.monotonic()
        for child in children:
            if child.process.poll() is not None and not child.ended:
                child.ended = now
        if any(child.process.poll() for child in children):
            last = min(last, now + LINGER_S)
        elif talks and (size := sum(os.fstat(child.out.fileno()).st_size for child in children)):
            last, said = (now + limit_s, size) if size > said else (last, said)
        if now > last:
            return
        time.sleep(POLL_S)


def _told(child: _Child, *, is_late: bool, limit_s: float) -> Ended:
    texts = []
    for file in (child.out, child.err):
        file.seek(0)
        texts.append(file.read().decode(errors="replace"))
    seconds = (child.ended or time.monotonic()) - child.began
    code = None if is_late else child.process.returncode
    return Ended(code, texts[0], texts[1], limit_s if is_late else seconds)
