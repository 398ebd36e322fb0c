"""Large libraries, imported without python looking for garbage in between, and beside threads."""

import contextlib
import gc
import importlib.util
import sys
from collections.abc import Iterator
from functools import lru_cache


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
