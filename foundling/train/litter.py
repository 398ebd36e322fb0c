"""Garbage collection on a clock of steps.

Left to itself, Python looks through every object it has whenever enough new ones are there, in the
middle of a step, for as long as a tenth of a second with torch loaded; on one rank of many it holds
up all. What there is after the first step (modules, graphs, the model) is frozen out of the search,
and the rest is looked through once in a while, at the same step on every rank.
"""

import contextlib
import gc
from collections.abc import Iterator

EVERY = 50
"""Steps between collections; few objects of a step hang in cycles at all."""


class Litter:
    """The clock; `paced` makes one."""

    def __init__(self) -> None:
        self._steps = 0

    def step(self, *, worked: bool = False) -> None:
        """Count a step; the first one leaves behind what lives as long as the run. After one with
        other work behind it (`worked`), an evaluation's knots must not hold memory for long."""
        if self._steps == 0:
            gc.collect()
            gc.freeze()
        self._steps += 1
        if worked or self._steps % EVERY == 0:
            gc.collect()


@contextlib.contextmanager
def paced() -> Iterator[Litter]:
    """Collect by the clock in here, and as before afterwards."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield Litter()
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
