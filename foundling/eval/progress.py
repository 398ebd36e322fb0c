"""How far an evaluation has come: a line now and then, with the time that is left."""

import time
from collections.abc import Callable

EVERY_S = 5.0


class Clock:
    """Counts the examples of one task and tells at most every few seconds."""

    def __init__(self, name: str, total: int, tell: Callable[[str], None] | None) -> None:
        self._name, self._total, self._tell = name, total, tell
        self._done = 0
        self._began = self._told = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the task began."""
        return time.monotonic() - self._began

    def add(self, count: int) -> None:
        """So many more are done."""
        self._done += count
        now = time.monotonic()
        ended = self._done >= self._total
        if self._tell is None or (now - self._told < EVERY_S and not ended):
            return
        self._told = now
        left = self.seconds / max(self._done, 1) * (self._total - self._done)
        rest = f"{self.seconds:.1f} s" if ended else f"about {left:.0f} s left"
        self._tell(f"  {self._name}: {self._done:,} of {self._total:,} examples, {rest}")
