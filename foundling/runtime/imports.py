"""Large libraries: imported without python looking for garbage in between, beside threads at work,
or on a thread while the main one waits for a device.

An import holds Python's lock, and a clock beside it would measure the wait for that: whoever times
something does so in `quiet()`, between two imports.
"""

import contextlib
import gc
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

_turn, _busy = threading.Lock(), threading.Lock()
"""Locks are not fair: the thread would take the second again before anybody else is awake. Whoever
times something takes the first before that, and the thread waits for it."""
_thread: threading.Thread | None = None


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """While hundreds of modules are loaded nothing is garbage, and looking for it took a tenth of
    a conversion's time. What is there afterwards is not looked at again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


@contextlib.contextmanager
def yielding() -> Iterator[None]:
    """An import holds Python's lock for as long as it may, five milliseconds; a thread that copies
    or hashes beside it asks for it some hundred times and would mostly wait."""
    kept = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    try:
        yield
    finally:
        sys.setswitchinterval(kept)


@lru_cache
def triton_is_here() -> bool:
    """Whether kernels of our own can be compiled."""
    return importlib.util.find_spec("triton") is not None


def do_ahead(tasks: Sequence[Callable[[], object]]) -> None:
    """Begin to do these, one after the other: imports, and what they make possible. Once a process;
    what fails here fails again, and is told, where it is needed."""
    global _thread

    def work() -> None:
        with yielding():
            for task in tasks:
                with _turn:
                    pass
                if not threading.main_thread().is_alive():
                    return  # it has ended with an error, and waits for this thread
                with _busy, contextlib.suppress(Exception):
                    task()

    if _thread is None:
        # No daemon: an interpreter that ends in the middle of an import may crash.
        _thread = threading.Thread(target=work, name="import-ahead")
        _thread.start()


def done_ahead() -> None:
    """Wait until everything that was begun is there. To be called before other modules are imported
    that need the same ones: two threads that import in circles could see them half made."""
    if _thread is not None:
        _thread.join()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing is imported on the thread while something is timed in here (processes that it has
    started go on, on other cores). `done_ahead` in here would wait for ever."""
    with _turn, _busy:
        yield
