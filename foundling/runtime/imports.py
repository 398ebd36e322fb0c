"""Large libraries, imported without python looking for garbage in between."""

import contextlib
import gc
from collections.abc import Iterator


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
