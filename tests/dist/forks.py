"""Ranks as forks of a process that has imported everything: a job begins in a moment.

What torchrun does, and no more: it sets the variables, tells the others to stop when one fails, and
kills what does not. A stopped process is not waited for.
"""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path

from foundling.runtime.processes import free_port
from foundling.train.faults.heartbeat import process_state

HERE = Path(__file__).parent
PRELOAD = ["stand_in", "replica_ranks", "worlds", "layout_ranks"]
# What a rank imports only when it needs it, and every rank does.
PRELOAD += ["torch._dynamo", "numpy.random", "numpy.fft"]
GRACE_S = 15.0


def run_ranks(
    target: Callable[..., None], *args: object, processes: int, errors: Path, life: int = 0
) -> int:
    """Run `target(*args)` as every rank of a job; the exit code of the first that failed, or 0.

    What they write to stderr is added to the file `errors`."""
    context = multiprocessing.get_context("forkserver")
    port = free_port()
    with ready_to_fork():
        ranks = [
            context.Process(target=_rank, args=(target, args, rank, processes, port, life, errors))
            for rank in range(processes)
        ]
        for rank in ranks:
            rank.start()
    first, until = 0, time.monotonic() + 120
    while any(_runs(rank.pid) for rank in ranks) and time.monotonic() < until:
        failed = next((rank.exitcode for rank in ranks if rank.exitcode), 0)
        if failed and not first:
            first, until = failed, time.monotonic() + GRACE_S
            for pid in (rank.pid for rank in ranks if rank.is_alive() and rank.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        time.sleep(0.02)
    for rank in ranks:
        rank.kill()
        rank.join()
    return first or max(abs(rank.exitcode or 0) for rank in ranks)


@contextlib.contextmanager
def ready_to_fork() -> Iterator[None]:
    """Begin the process that ranks are forks of; it must find what it imports."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(HERE), str(HERE.parents[1]), before])
    )
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _runs(pid: int | None) -> bool:
    return process_state(pid or 0) not in ("", "Z", "T")


def _rank(
    target: Callable[..., None],
    args: tuple[object, ...],
    rank: int,
    processes: int,
    port: int,
    life: int,
    errors: Path,
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(processes),
        LOCAL_WORLD_SIZE=str(processes),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RESTART_COUNT=str(life),
    )
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 2)
    target(*args)
