"""Work that goes on beside a conversion's main thread."""

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from foundling.config import CheckpointError

T = TypeVar("T")
PATIENCE = 10
"""Of 19."""
Alive = Callable[[], None]
"""To be called now and then; raises when nobody wants the result any more."""


class Beside(Generic[T]):
    """A thread with one result, which ends soon when nobody wants it any more. A patient one lets
    others go first where there are fewer cores than work."""

    def __init__(self, work: Callable[[Alive], T], *, patient: bool = False) -> None:
        self._unwanted = threading.Event()
        self._pool = ThreadPoolExecutor(1, initializer=_stand_back if patient else None)
        self._job = self._pool.submit(work, self._alive)

    def result(self) -> T:
        """Wait for it."""
        return self._job.result()

    def give_up(self) -> None:
        """End the thread where it next asks whether it is wanted."""
        self._unwanted.set()
        self._pool.shutdown(cancel_futures=True)

    def _alive(self) -> None:
        if self._unwanted.is_set():
            raise CheckpointError("the comparison was given up.")


def _stand_back() -> None:
    """Lower this thread's priority, and that of threads that it starts: Linux has one for each."""
    if hasattr(os, "setpriority") and os.uname().sysname == "Linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), PATIENCE)
