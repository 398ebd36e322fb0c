"""Two things that a process pays once, and a process of tests, which trains a hundred times, did
each time: half of a tiny run was spent on them."""

import gc
from functools import lru_cache

import pytest

THAW_EVERY = 40


def stay_frozen(patch: pytest.MonkeyPatch) -> None:
    """Keep what is loaded out of the search for garbage.

    A run ends with `gc.unfreeze()`, after which each collection of the next one looks through all
    of torch and pytest: 0.3 s, three times a run. Only every so often is it done here, with what a
    test has left behind in knots.
    """
    thaw, ends = gc.unfreeze, 0

    def unfreeze() -> None:
        nonlocal ends
        ends += 1
        if ends % THAW_EVERY == 0:
            thaw()
            gc.collect()
            gc.freeze()

    gc.freeze()
    patch.setattr(gc, "unfreeze", unfreeze)


def measure_peak_once(patch: pytest.MonkeyPatch) -> None:
    """Measure what this machine can multiply at the first run only."""
    from foundling.train import setup

    patch.setattr(setup, "matmul_peak", lru_cache(setup.matmul_peak))
