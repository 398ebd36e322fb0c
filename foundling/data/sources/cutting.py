"""Where a file may be cut, so that several processes can read it: by rows, never through one.

Where the cuts fall depends on the file alone, so a build that is started again, or runs elsewhere,
has the same pieces. Compressed text cannot be entered in the middle and stays in one piece.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from foundling.data.sources.base import File
from foundling.data.sources.opening import DAMAGE, TABLES, Form, raise_if_passing
from foundling.data.sources.tables import Range, ranges, size_of_piece

LEAST_BYTES = 4 << 20
"""Smaller pieces cost more in starting them than they gain."""
MOST_PIECES = 64
"""A file of any size is enough work for this many processes, or a few more."""
_STEP = 1 << 20


@dataclass(frozen=True)
class Span:
    """A part of a file of lines: bytes `start` to `stop` (None: the end), and its first line."""

    start: int = 0
    stop: int | None = None
    first_line: int = 1


WHOLE = Span()


def cuts(file: File, form: Form) -> Iterator[Range | Span]:
    """The parts of a file, in order."""
    if form.format in TABLES:
        yield from ranges(file, form.format, LEAST_BYTES, MOST_PIECES)
    elif form.compression or file.local is None or form.format not in ("txt", "jsonl"):
        yield WHOLE
    else:
        yield from _spans(file, (b"\n\n", b"\n\r\n") if form.format == "txt" else (b"\n",))


def _spans(file: File, marks: tuple[bytes, ...]) -> Iterator[Span]:
    """Parts that end at one of the marks; lines are counted on the way."""
    start, first_line = 0, 1
    try:
        with file.open() as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            at, line, tail = 0, 1, b""
            while block := stream.read(_STEP):
                window = tail + block
                # A cut at least this far into the window gives a part that is large enough.
                enough = int(size_of_piece(size, size - start, LEAST_BYTES, MOST_PIECES))
                reach = start + enough - (at - len(tail))
                found = -1
                if reach < len(window):
                    found = _first(window, marks, max(reach, 0))
                if found >= 0 and at - len(tail) + found < size:
                    cut = at - len(tail) + found
                    # `line` counts what comes before the block, and a cut may lie in the tail.
                    lines = line - tail.count(b"\n", found)
                    lines += block.count(b"\n", 0, max(0, found - len(tail)))
                    yield Span(start, cut, first_line)
                    start, first_line = cut, lines
                line += block.count(b"\n")
                at += len(block)
                tail = window[-2:]
    except DAMAGE as error:
        raise_if_passing(error, file.name)
    yield Span(start, None, first_line)


def _first(window: bytes, marks: tuple[bytes, ...], start: int) -> int:
    ends = [at + 1 for mark in marks if (at := window.find(mark, start)) >= 0]
    return min(ends, default=-1)
