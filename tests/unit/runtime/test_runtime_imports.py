"""Work on a thread ahead of the main one, and silence for clocks."""

import threading
import time
from collections.abc import Iterator

import pytest

from foundling.runtime import imports
from foundling.runtime.imports import do_ahead, done_ahead, quiet


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(imports, "_thread", None)
    yield
    done_ahead()


def test_everything_is_done_in_order_whatever_fails() -> None:
    seen: list[int] = []

    def fail() -> None:
        seen.append(2)
        raise ImportError("no such module")

    do_ahead([lambda: seen.append(1), fail, lambda: seen.append(3)])
    done_ahead()
    assert seen == [1, 2, 3]
    do_ahead([lambda: seen.append(4)])
    done_ahead()
    assert seen == [1, 2, 3], "once a process"


def test_nothing_begins_while_somebody_times() -> None:
    began, go_on = threading.Event(), threading.Event()
    seen: list[str] = []

    def first() -> None:
        began.set()
        go_on.wait(10)
        seen.append("first")

    do_ahead([first, *[lambda: seen.append("later")] * 50])
    assert began.wait(10)
    threading.Timer(0.05, go_on.set).start()
    with quiet():  # waits for the first, and goes before the fifty others
        there = list(seen)
        time.sleep(0.05)
        assert seen == there == ["first"]
    done_ahead()
    assert len(seen) == 51


def test_without_work_ahead_nobody_waits() -> None:
    done_ahead()
    with quiet():
        pass
