"""Arms a program under test: put this folder on PYTHONPATH and say in TEST_DIE_AT where to die.

    TEST_DIE_AT=write:3             at the third write of a checkpoint
    TEST_DIE_AT=rename:1:rank1      rank 1 only (RANK; a process without one is rank 0)
    TEST_DIE_AT=fsync:2:rank0:all   the whole process group, or `agent`: the parent process

TEST_DIE_ONCE names a file: it is made when the program dies, and a program that finds it lives on,
so that a restarted job is not killed again. What ships knows nothing of this: it only says where it
is (foundling/runtime/points.py).
"""

import itertools
import os
import signal
import threading


def arm(order: str, token: str) -> None:
    """Die at the n-th passing of a point."""
    from foundling.runtime import points

    point, number, *rest = order.split(":")
    rank = rest[0].removeprefix("rank") if rest else os.environ.get("RANK", "0")
    whom = rest[1] if len(rest) > 1 else "self"
    if rank != os.environ.get("RANK", "0"):
        return
    passed = itertools.count(1)
    lock = threading.Lock()

    def at(here: str) -> None:
        if here != point:
            return
        with lock:
            if next(passed) != int(number):
                return
            if token:
                try:
                    os.close(os.open(token, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    return
            kill(whom)

    points.at = at


def kill(whom: str) -> None:
    """SIGKILL to this process, its parent or its whole process group."""
    if whom == "agent":
        os.kill(os.getppid(), signal.SIGKILL)
    elif whom == "all":
        os.killpg(os.getpgrp(), signal.SIGKILL)
    else:
        os.kill(os.getpid(), signal.SIGKILL)


if os.environ.get("TEST_DIE_AT"):
    arm(os.environ["TEST_DIE_AT"], os.environ.get("TEST_DIE_ONCE", ""))
