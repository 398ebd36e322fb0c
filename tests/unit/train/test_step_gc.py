"""Garbage is collected by the clock while a run goes on, and as ever afterwards."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from foundling.train.step import GC_INTERVAL, manual_gc

thaw = gc.unfreeze  # the real one: this module is imported before tests/quick.py puts another


@pytest.fixture(autouse=True)
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gc, "unfreeze", thaw)
    thaw()
    yield
    gc.freeze()


class Knot:
    """Only a collection finds it."""

    def __init__(self) -> None:
        self.itself = self


def test_cycles_go_on_the_clock_and_the_first_steps_are_frozen() -> None:
    assert gc.isenabled()
    with manual_gc() as gc_control:
        assert not gc.isenabled()
        gc_control.step()
        assert gc.get_freeze_count() > 0
        knot = weakref.ref(Knot())
        for _ in range(GC_INTERVAL - 2):
            gc_control.step()
        assert knot() is not None
        gc_control.step()
        assert knot() is None
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_an_error_leaves_nothing_behind() -> None:
    def fail() -> None:
        with manual_gc() as gc_control:
            gc_control.step()
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
