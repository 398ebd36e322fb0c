"""Text, JSONL and CSV as records with their places, in memory that no file can overfill.

Everything is read in bytes and taken apart at newlines before it is decoded, so that one bad byte
costs one row. Nothing here raises for what a row holds; a stream that breaks off raises one of
DAMAGE, which the caller turns into a row.
"""

import csv
import json
import re
from collections.abc import Iterator
from typing import BinaryIO

from foundling.data.sources.making import NOT_UTF8, TOO_LONG, Bad
from foundling.data.sources.opening import Broken

Record = tuple[int, object]
"""A place in the file, and what is there: a value, or Bad."""

RECORD_BYTES = 1 << 26
"""No record longer than this is ever held."""
BLOCK = 1 << 20
BOM = b"\xef\xbb\xbf"

ESCAPED = re.compile("[\udc80-\udcff]")
_BLANK = re.compile(r"\n[^\S\n]+(?=\n)")
_BLANK_BYTES = re.compile(rb"\n[^\S\n]+(?=\n)")


def bounded_lines(
    stream: BinaryIO, first: int = 1, stop: int | None = None
) -> Iterator[tuple[int, bytes | Bad]]:
    """Lines with their numbers, up to `stop` bytes; one that is too long is skipped over."""
    number, read = first, 0
    while stop is None or read < stop:
        line = stream.readline(RECORD_BYTES)
        if not line:
            return
        read += len(line)
        if len(line) == RECORD_BYTES and line[-1] != 10:
            sample = _shown(line)
            while rest := stream.readline(BLOCK):
                read += len(rest)
                if rest[-1] == 10:
                    break
            yield number, Bad(f"{TOO_LONG} of {RECORD_BYTES} bytes a row", sample)
        else:
            yield number, line
        number += 1


def parsed(line: bytes) -> object:
    """A value from one line of JSON."""
    try:
        text = line.decode()
    except UnicodeDecodeError:
        return Bad(NOT_UTF8, _shown(line))
    try:
        return json.loads(text)
    except ValueError:
        return Bad("not JSON", text[:200])
    except RecursionError:
        return Bad("nested too deeply", text[:200])


def read_jsonl(stream: BinaryIO, first: int = 1, stop: int | None = None) -> Iterator[Record]:
    """A value a line; blank lines are nothing."""
    for number, line in bounded_lines(stream, first, stop):
        if isinstance(line, Bad):
            yield number, line
            continue
        if number == 1:
            line = line.removeprefix(BOM)
        if not line.isspace() and line:
            yield number, parsed(line)


def read_txt(stream: BinaryIO, first: int = 1, stop: int | None = None) -> Iterator[Record]:
    """Documents separated by blank lines, each with the number of its first line."""
    number, held, skipping = first, b"", False
    for block in _blocks(stream, first, stop):
        seen = max(0, len(held) - 2)
        held += block
        if skipping:
            end = _blank_after(held, seen)
            if end < 0:
                # Two bytes are kept: a blank line may begin in them.
                number += held.count(b"\n", 0, len(held) - 2)
                held = held[-2:]
                continue
            number += held.count(b"\n", 0, end)
            held, skipping, seen = held[end:], False, 0
        end = max(held.rfind(b"\n\n", seen), held.rfind(b"\n\r\n", seen)) + 1
        if end:
            yield from _documents(held[:end], number)
            number += held.count(b"\n", 0, end)
            held = held[end:]
        elif len(held) > RECORD_BYTES:
            body = held.lstrip()
            place = number + held.count(b"\n", 0, len(held) - len(body))
            yield place, Bad(f"{TOO_LONG} of {RECORD_BYTES} bytes a row", _shown(body))
            skipping = True
    if not skipping:
        yield from _documents(held, number)


def _blocks(stream: BinaryIO, first: int, stop: int | None) -> Iterator[bytes]:
    left, begin = stop, first == 1
    while block := stream.read(BLOCK if left is None else min(BLOCK, left)):
        if left is not None:
            left -= len(block)
        yield block.removeprefix(BOM) if begin else block
        begin = False


def _blank_after(data: bytes, start: int) -> int:
    """Where the first blank line begins; -1 if there is none."""
    ends = [found + 1 for mark in (b"\n\n", b"\n\r\n") if (found := data.find(mark, start)) >= 0]
    return min(ends, default=-1)


def _documents(data: bytes, number: int) -> Iterator[Record]:
    """Documents of whole lines, of which the first has this number."""
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
    # Lines of spaces become empty ones, so that a blank line is two newlines and nothing else.
    data = _BLANK_BYTES.sub(b"\n", b"\n%b\n" % data)
    number -= 1
    for part in data.split(b"\n\n"):
        body = part.strip(b"\n")
        if body:
            place = number + part.index(body[:1])
            try:
                text = body.decode()
            except UnicodeDecodeError:
                yield place, Bad(NOT_UTF8, _shown(body))
            else:
                if text.isascii() or not _BLANK.search(f"\n{text}\n"):
                    yield place, text
                else:
                    yield from _divided(text, place)
        number += part.count(b"\n") + 2


def _divided(text: str, number: int) -> Iterator[Record]:
    """A document with blank lines that only decoding shows: other alphabets have other spaces."""
    lines: list[str] = []
    for place, line in enumerate([*text.split("\n"), ""], number):
        if line and not line.isspace():
            lines.append(line)
        elif lines:
            yield place - len(lines), "\n".join(lines)
            lines = []


def _back(text: str) -> str:
    """The beginning of undecodable text, with its bad bytes spelt out."""
    return _shown(text[:200].encode("utf-8", "surrogateescape"))


def _shown(data: bytes) -> str:
    return data[:200].decode("utf-8", "backslashreplace")


def csv_names(stream: BinaryIO, delimiter: str) -> list[str]:
    """The names of the columns, as often as each is there."""
    try:
        rows = csv.reader(_Lines(stream), delimiter=delimiter, strict=True)
        return next((fields for fields in rows if fields), [])
    except csv.Error:
        return []  # whoever reads the rows says what is wrong


def read_csv(stream: BinaryIO, delimiter: str) -> Iterator[Record]:
    """Rows under the names of the first line, each with the number of its first line."""
    csv.field_size_limit(RECORD_BYTES)  # for the whole process; the default is 128 KiB
    lines = _Lines(stream)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    names: list[str] | None = None
    rows = 0
    while True:
        place = lines.number + 1
        lines.begin()
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if lines.ended:  # all that follows the quote was taken for one field
                raise Broken("a quoted field is not closed", lost=lines.swallowed(rows)) from None
            yield place, Bad(f"not CSV ({error})", lines.sample)
            continue
        if not fields:
            continue
        rows += 1
        if names is None:
            names = fields
        elif lines.dirty:
            yield place, Bad(NOT_UTF8, _back(lines.sample))
        elif len(fields) != len(names):
            reason = f"{len(fields)} fields under {len(names)} names"
            yield place, Bad(reason, lines.sample)
        else:
            yield place, dict(zip(names, fields, strict=True))


class _Lines:
    """Decoded lines for the CSV reader, which asks for as many as a row takes."""

    def __init__(self, stream: BinaryIO) -> None:
        self._lines = bounded_lines(stream)
        self.number = 0
        self.ended = False
        self._size = self._before = 0
        self.begin()

    def begin(self) -> None:
        """The next line is the first of a row."""
        self._before += self._size
        self.sample, self.dirty, self._size = "", False, 0

    def swallowed(self, rows: int) -> int:
        """About how many rows are in the field at hand, by the length of the rows before it."""
        return round(rows * self._size / self._before) if self._before else 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        found = next(self._lines, None)
        if found is None:
            self.ended = True
            raise StopIteration
        self.number, line = found
        self._size += len(line)
        if isinstance(line, Bad) or self._size > RECORD_BYTES:
            # The reader is inside a quoted field: where the next row begins, nobody can say.
            raise Broken(f"a row does not end within {RECORD_BYTES} bytes")
        if self.number == 1:
            line = line.removeprefix(BOM)
        try:
            text = line.decode()
        except UnicodeDecodeError:
            text, self.dirty = line.decode("utf-8", "surrogateescape"), True
        self.sample = self.sample or text[:200]
        return text
