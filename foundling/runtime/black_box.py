"""The collectives of a process in a file that outlives it: what it entered last is known although
it died in the middle, by a kill or by an abort in somebody else's thread.

The file is mapped into memory, so noting something is a copy of a few bytes and no call of the
system; the kernel keeps the pages whatever becomes of the process. Rejected: writing a line each
time, which is too dear for something done many times a step.
"""

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

KEPT = 64
"""Collectives remembered: enough for several steps."""
_HEAD = struct.Struct("<q")
_ENTRY = struct.Struct("<qq48s")
_SIZE = _HEAD.size + KEPT * _ENTRY.size


@dataclass(frozen=True)
class Entered:
    """A collective that was entered."""

    number: int
    """Counted from the beginning of the process."""
    name: str
    step: int


class BlackBox:
    """The last collectives, and the number of the last one that was left."""

    def __init__(self, pages: mmap.mmap) -> None:
        self._pages = pages

    def enter(self, one: Entered) -> None:
        """Note what is about to be called."""
        at = _HEAD.size + one.number % KEPT * _ENTRY.size
        name = one.name.encode()[:48]
        _ENTRY.pack_into(self._pages, at, one.number, one.step, name)

    def leave(self, number: int) -> None:
        """Note that it returned."""
        _HEAD.pack_into(self._pages, 0, number)


@contextmanager
def black_box(path: Path) -> Iterator[BlackBox | None]:
    """A new box at `path`; None on a disk that cannot map files."""
    with contextlib.ExitStack() as stack:
        box = None
        with contextlib.suppress(OSError, ValueError):
            path.unlink(missing_ok=True)  # never under a mapping of its own
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            stack.callback(os.close, descriptor)
            os.ftruncate(descriptor, _SIZE)
            box = BlackBox(stack.enter_context(mmap.mmap(descriptor, _SIZE)))
        yield box


def read_box(path: Path) -> tuple[tuple[Entered, ...], int]:
    """What a process entered, in order, and the number of the last one it left; empty where there
    is no box."""
    try:
        data = path.read_bytes()
        left = int(_HEAD.unpack_from(data, 0)[0])
        found = [_ENTRY.unpack_from(data, _HEAD.size + n * _ENTRY.size) for n in range(KEPT)]
    except (OSError, struct.error):
        return (), 0
    entered = [
        Entered(number, name.rstrip(b"\0").decode(errors="replace"), step)
        for number, step, name in found
        if number > 0
    ]
    return tuple(sorted(entered, key=lambda one: one.number)), left
