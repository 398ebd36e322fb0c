"""What is open: the things used last, so many at most in a process, whoever asks for them."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Thing = TypeVar("Thing")


class Pool(Generic[Thing]):
    """Keeps the `limit` things that were asked for last.

    Rejected: lru_cache, whose key would be the whole description of a shard, hashed anew for every
    row that is read.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: OrderedDict[Hashable, Thing] = OrderedDict()
        self._lock = threading.Lock()  # a loader's thread and the loop may ask at once

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable, make: Callable[[], Thing]) -> Thing:
        """The thing of that key, made if it is not there."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        made = make()
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > self.limit:
                self._kept.popitem(last=False)
        return made

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._kept.clear()
