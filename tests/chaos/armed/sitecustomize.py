"""Arms a program under test: put this folder on PYTHONPATH and say in TEST_DIE_AT where to die.

    TEST_DIE_AT=write:3                 at the third write of a checkpoint
    TEST_DIE_AT=rename:1:rank1          rank 1 only (RANK; a process without one is rank 0)
    TEST_DIE_AT=fsync:2:rank0:agent     with it: torchrun, its parent; `launcher`, the parent of
                                        that; or `all`: both and all their ranks

TEST_DIE_ONCE names a file: it is made when the program dies, and a program that finds it lives on,
so that a restarted job is not killed again. It holds the time and the names in the folder
TEST_DIE_SEES, as they were at that moment. TEST_DIE_ORDERS names a file with both, in two lines,
which each life of a job reads anew.

    TEST_PLANT=nan:7,spike:14           bad batches, as tests/chaos/planted.py has them; a process
                                        without RANK must have TEST_ALONE

    TEST_WINDOW=16                      steps that a spike is measured against; likewise

What ships knows nothing of this: it only says where it is
(foundling/runtime/files.py).
"""

import itertools
import json
import os
import signal
import sys
import threading
import time


def arm(order: str, token: str) -> None:
    """Die at the n-th passing of a point."""
    from foundling.runtime import files

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
            if token and not leave_word(token):
                return
            for process in family(whom, os.getpid(), os.getppid()):
                os.kill(process, signal.SIGKILL)

    files.failpoint = at


def leave_word(token: str) -> bool:
    """Make the token, whole or not at all; whether it was not there yet."""
    folder = os.environ.get("TEST_DIE_SEES", "")
    seen = sorted(os.listdir(folder)) if folder and os.path.isdir(folder) else []
    draft = f"{token}.{os.getpid()}"
    with open(draft, "w") as file:
        json.dump({"time": time.time(), "seen": seen}, file)
    try:
        os.link(draft, token)
    except FileExistsError:
        return False
    finally:
        os.unlink(draft)
    return True


def family(whom: str, rank: int, agent: int) -> list[int]:
    """Who is killed with a rank, the rank last."""
    if whom == "self":
        return [rank]
    with open(f"/proc/{agent}/stat") as file:
        launcher = int(file.read().rpartition(")")[2].split()[1])
    if whom != "all":
        return [{"agent": agent, "launcher": launcher}[whom]]
    with open(f"/proc/{agent}/task/{agent}/children") as file:
        ranks = [int(word) for word in file.read().split()]
    return [launcher, agent, *(other for other in ranks if other != rank), rank]


if os.environ.get("TEST_PLANT") and ("RANK" in os.environ or "TEST_ALONE" in os.environ):
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from planted import plant

    environment = os.environ
    rank, ranks = environment.get("RANK", "0"), environment.get("WORLD_SIZE", "1")
    plant(environment["TEST_PLANT"], int(rank), int(ranks))
if os.environ.get("TEST_WINDOW") and ("RANK" in os.environ or "TEST_ALONE" in os.environ):
    from foundling.train.faults import anomaly

    anomaly.WINDOW = int(os.environ["TEST_WINDOW"])
if os.environ.get("TEST_DIE_ORDERS"):
    with open(os.environ["TEST_DIE_ORDERS"]) as orders:
        lines = orders.read().splitlines()
    if lines:
        arm(*lines)
elif os.environ.get("TEST_DIE_AT"):
    arm(os.environ["TEST_DIE_AT"], os.environ.get("TEST_DIE_ONCE", ""))
