"""Text, JSONL and CSV as records with their places, in memory that no file can overfill.

Everything is read in bytes and taken apart at newlines before it is decoded, so that one bad byte
costs one row. Nothing here raises for what a row holds; a stream that breaks off raises one of
DAMAGE, which the caller turns into a row.
"""

import csv
import io
import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import BinaryIO

from foundling.data.readers.file_formats import Broken
from foundling.data.readers.row_builder import NOT_UTF8, TOO_LONG, Bad

Record = tuple[int, object]
"""A place in the file, and what is there: a value, or Bad."""

RECORD_BYTES = 1 << 26
"""No record longer than this is ever held."""
BLOCK = 1 << 20
BOM = b"\xef\xbb\xbf"


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
    held: list[bytes] = []
    place = size = 0
    for number, line in chain(bounded_lines(stream, first, stop), [(0, b"")]):
        if isinstance(line, Bad):
            line, size = (line.sample or "").encode(), RECORD_BYTES
        elif number == 1:
            line = line.removeprefix(BOM)
        if not _is_blank(line):
            place = place if held else number
            size += len(line)
            if size <= RECORD_BYTES or not held:
                held.append(line)
        elif held:
            text = b"".join(held).replace(b"\r\n", b"\n").removesuffix(b"\n")
            too_long = Bad(f"{TOO_LONG} of {RECORD_BYTES} bytes a row", _shown(text))
            yield place, too_long if size > RECORD_BYTES else _decoded(text)
            held, size = [], 0


def _is_blank(line: bytes) -> bool:
    """Other alphabets have other spaces, which only decoding shows."""
    rest = line.lstrip()
    return not rest or (rest[0] > 127 and rest.decode(errors="replace").isspace())


def _decoded(text: bytes) -> object:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return Bad(NOT_UTF8, _shown(text))


def _back(text: str) -> str:
    """The beginning of undecodable text, with its bad bytes spelt out."""
    return _shown(text[:200].encode("utf-8", "surrogateescape"))


def _shown(data: bytes) -> str:
    return data[:200].decode("utf-8", "backslashreplace")


def csv_names(stream: BinaryIO, delimiter: str) -> list[str]:
    """The names of the columns, as often as each is there."""
    try:
        rows = csv.reader(_LineReader(stream), delimiter=delimiter, strict=True)
        return next((fields for fields in rows if fields), [])
    except csv.Error:
        return []  # the reader of the rows says what is wrong


def read_csv(stream: BinaryIO, delimiter: str) -> Iterator[Record]:
    """Rows under the names of the first line, each with the number of its first line."""
    csv.field_size_limit(RECORD_BYTES)  # for the whole process; the default is 128 KiB
    lines = _LineReader(stream)
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


class _LineReader:
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
            # The reader is inside a quoted field: where the next row begins is unknown.
            raise Broken(f"a row does not end within {RECORD_BYTES} bytes")
        if self.number == 1:
            line = line.removeprefix(BOM)
        try:
            text = line.decode()
        except UnicodeDecodeError:
            text, self.dirty = line.decode("utf-8", "surrogateescape"), True
        self.sample = self.sample or text[:200]
        return text


# JSON that is not a value a line: one long list, or values one after another, read as they come.
#
# Strings and brackets are matched to find where a value ends, and the standard library parses it:
# memory is bounded by the longest row, a bad row costs itself alone, and a value is the same as on
# a line of its own. Rejected: ijson (docs/decisions/2026-11-19-json-lists-without-ijson.md).

_SPACE = re.compile(rb"[ \t\r\n]*")
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{}]', re.DOTALL)
"""A string that ends, a bracket, or the beginning of a string that goes on. Possessive: to go back
into a string of many escapes would cost a frame of memory for each."""
_SCALAR = re.compile(rb"[^\s,\[\]{}]*")


def is_lines(stream: BinaryIO) -> bool:
    """Whether a .json file holds a value a line, by its first line that is not blank."""
    begin = stream.peek(BLOCK) if isinstance(stream, io.BufferedReader) else b""
    if begin.removeprefix(BOM).lstrip()[:1] == b"[":  # perhaps all in one line
        return False
    for _, line in bounded_lines(stream):
        if isinstance(line, Bad):
            return False
        if not line.isspace():
            line = line.removeprefix(BOM)
            return line.lstrip()[:1] == b"{" and not isinstance(parsed(line), Bad)
    return True


def read_json(stream: BinaryIO) -> Iterator[Record]:
    """The values of a list, numbered from 0, or of a sequence of values."""
    window = _Window(stream)
    listed = window.peek() == b"["
    window.at += listed
    number = 0
    while mark := window.peek():
        if listed and mark == b"]":
            window.at += 1
            if window.peek():
                raise window.broken("more follows the end of the list", number)
            return
        if listed and number:
            if mark != b",":
                raise window.broken("no comma between two rows", number)
            window.at += 1
            if window.peek() in (b"", b"]"):  # the end, or a comma too many before it
                continue
        yield number, parsed(window.value())
        number += 1
    if listed:
        raise window.broken("the list is not closed", number)


class _Window:
    """What was read and is not used yet: `_data[at:]`."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._data = b""
        self._used = 0
        """Bytes that are no longer in the window."""
        self.at = 0
        while len(self._data) < len(BOM) and self._more():
            pass
        self._data = self._data.removeprefix(BOM)

    def _more(self) -> bool:
        """Read on, as much again as there is: a long row is then not looked through too often."""
        block = self._stream.read(max(BLOCK, len(self._data) - self.at))
        self._used += self.at
        self._data, self.at = self._data[self.at :] + block, 0
        return bool(block)

    def peek(self) -> bytes:
        """The next byte that is no space; empty at the end."""
        while True:
            space = _SPACE.match(self._data, self.at)
            self.at = space.end() if space else self.at
            if self.at < len(self._data) or not self._more():
                return self._data[self.at : self.at + 1]

    def value(self) -> bytes:
        """The value that begins here."""
        while (end := self._end()) is None:
            if len(self._data) - self.at > RECORD_BYTES:
                raise Broken(f"a row does not end within {RECORD_BYTES} bytes")
            if not self._more():
                if self._data[self.at] in b'"[{':
                    raise Broken("the file breaks off inside a row")
                end = len(self._data)
                break
        value, self.at = self._data[self.at : end], end
        return value

    def _end(self) -> int | None:
        """Where the value at hand ends; None if perhaps not in the window."""
        if self._data[self.at] not in b'"[{':
            scalar = _SCALAR.match(self._data, self.at)
            # A stray mark is a bad row of one byte, or the same place would be met for ever.
            end = max(scalar.end() if scalar else 0, self.at + 1)
            return end if end < len(self._data) else None
        depth = 0
        for token in _TOKEN.finditer(self._data, self.at):
            if token[0] == b'"':
                return None
            depth += (token[0] in (b"[", b"{")) - (token[0] in (b"]", b"}"))
            if depth <= 0:
                return token.end()
        return None

    def broken(self, reason: str, rows: int) -> Broken:
        """What is read and in no row counts as rows of the mean length."""
        left, taken = len(self._data) - self.at, self._used + self.at
        return Broken(reason, lost=round(rows * left / taken) if taken else 0)
