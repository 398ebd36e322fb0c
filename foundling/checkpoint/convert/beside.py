"""Work that goes on beside a conversion's main thread."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from foundling.config import CheckpointError

T = TypeVar("T")
Alive = Callable[[], None]
"""To be called now and then; raises when nobody wants the result any more."""


class Beside(Generic[T]):
    """A thread with one result, which ends soon when nobody wants it any more."""

    def __init__(self, work: Callable[[Alive], T]) -> None:
        self._unwanted = threading.Event()
        self._pool = ThreadPoolExecutor(1)
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
