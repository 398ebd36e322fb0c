"""Text, JSONL and CSV as records with their places, in memory that no file can overfill.

Everything is read in bytes and taken apart at newlines before it is decoded, so that one bad byte
costs one row. Nothing here raises for what a row holds; a stream that breaks off raises one of
DAMAGE, which the caller turns into a row.
"""

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator
from typing import BinaryIO

from foundling.data.readers.file_formats import Broken
from foundling.data.readers.row_builder import NOT_UTF8, TOO_LONG, Bad

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


# JSON that is not a value a line: one long list, or objects one after another, read as they come.
#
# The parser of the standard library is asked first, at its full speed; where it fails, brackets and
# quotes are counted to see whether the value goes on in the next block, is bad by itself, or is too
# long to hold. So memory is bounded by the longest row, and a bad row costs itself alone.

_SPACE = re.compile(r"[ \t\r\n]*")
_MARK = re.compile(r'["\\\[\]{}]')
_SCALAR = re.compile(r"[^\s,\[\]{}]*")
_OPEN = '"[{'
_SCALAR_CHARS = 1 << 20
"""Longer than any number: what goes on after it is no value."""


def is_lines(stream: BinaryIO) -> bool:
    """Whether a .json file holds a value a line, by its first line that is not blank."""
    begin = stream.peek(BLOCK) if isinstance(stream, io.BufferedReader) else b""
    if begin.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":  # perhaps all in one line
        return False
    for _, line in bounded_lines(stream):
        if isinstance(line, Bad):
            return False
        if not line.isspace():
            start = line.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
            return start == b"{" and not isinstance(parsed(line), Bad)
    return True


def read_json(stream: BinaryIO) -> Iterator[Record]:
    """The values of a list, numbered from 0, or of a sequence of values."""
    values = _Values(stream)
    listed = values.peek() == "["
    if listed:
        values.take()
    number = 0
    while True:
        mark = values.peek()
        if not mark:
            if listed:
                raise values.broken("the list is not closed", number)
            return
        if listed and mark == "]":
            values.take()
            if values.peek():
                raise values.broken("more follows the end of the list", number)
            return
        if listed and number:
            if mark != ",":
                raise values.broken("no comma between two rows", number)
            values.take()
            if values.peek() in ("", "]"):  # the end, or a comma too many before it
                continue
        yield number, values.next()
        number += 1


class _Values:
    """A window on the text: `_text[_at:]` is what has not been read yet."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._parse = json.JSONDecoder().raw_decode
        self._text = ""
        self._at = 0
        self._ended = False
        self._dirty = False
        self._end = 0
        self._added = 0
        self._dropped = 0
        """Characters that are no longer in the window."""
        self._more()
        self._text = self._text.removeprefix("\ufeff")

    def peek(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            match = _SPACE.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._more()

    def broken(self, reason: str, rows: int) -> Broken:
        """What is read and in no row counts as rows of the mean length."""
        left = len(self._text) - self._at
        taken = self._dropped + self._at
        return Broken(reason, lost=round(rows * left / taken) if taken else 0)

    def take(self) -> None:
        """Step over the character that `peek` showed."""
        self._at += 1

    def next(self) -> object:
        """The value that begins here, or why it is none."""
        try:
            value, end = self._parse(self._text, self._at)
        except (ValueError, RecursionError):
            return self._slow()
        if end == len(self._text) and not self._ended:  # a number may go on in the next block
            return self._slow()
        return self._judged(value, end)

    def _slow(self) -> object:
        """Find the end of the value first, reading as much as that takes."""
        sample = self._text[self._at : self._at + 200]
        whole = self._to_end()
        end, start = self._end, self._at
        if not whole:
            self._at = end
            return Bad(f"{TOO_LONG} of {RECORD_BYTES} characters a row", sample)
        try:
            value, stop = self._parse(self._text, start)
            if stop != end:
                raise ValueError
        except (ValueError, RecursionError) as error:
            self._at = end
            deep = isinstance(error, RecursionError)
            return Bad("nested too deeply" if deep else "not JSON", sample)
        return self._judged(value, end)

    def _judged(self, value: object, end: int) -> object:
        start, self._at = self._at, end
        if self._dirty and ESCAPED.search(self._text, start, end):
            raw = self._text[start : start + 200].encode("utf-8", "surrogateescape")
            return Bad(NOT_UTF8, raw.decode("utf-8", "backslashreplace"))
        return value

    def _to_end(self) -> bool:
        """Set `_end` to where the value ends; False if it was too long to keep."""
        if self._text[self._at] not in _OPEN:
            self._scalar()
            return True
        depth, quoted, whole = 0, False, True
        at = self._at
        while True:
            match = _MARK.search(self._text, at)
            if match is None:
                whole = self._extend(whole)
                at = len(self._text) - self._added
                continue
            mark, at = match[0], match.end()
            if mark == "\\":
                if at == len(self._text):
                    whole = self._extend(whole)
                    at = len(self._text) - self._added
                at += 1
            elif mark == '"':
                quoted = not quoted
            elif not quoted:
                depth += 1 if mark in "[{" else -1
            if not quoted and depth <= 0 and mark != "\\":
                self._end = at
                return whole

    def _scalar(self) -> None:
        while True:
            match = _SCALAR.match(self._text, self._at)
            self._end = match.end() if match else self._at
            if self._end < len(self._text) or self._ended or self._end - self._at > _SCALAR_CHARS:
                break
            self._more()
        # A stray mark is a bad row of one character, or the same place would be met for ever.
        self._end = max(self._end, self._at + 1)

    def _extend(self, whole: bool) -> bool:
        """Read on inside a value; one that is too long is dropped as it comes."""
        if self._ended:
            raise Broken("the file breaks off inside a row")
        if len(self._text) - self._at > RECORD_BYTES or not whole:
            self._dropped += len(self._text)
            self._text, self._at, whole = "", 0, False
        before = len(self._text) - self._at
        self._more()
        self._added = len(self._text) - before
        return whole

    def _more(self) -> None:
        """Append one more block to what is left of the text."""
        block = self._stream.read(BLOCK)
        self._ended = not block
        added = self._decoder.decode(block, final=self._ended)
        if not added.isascii():
            self._dirty = self._dirty or ESCAPED.search(added) is not None
        self._dropped += self._at
        self._text, self._at = self._text[self._at :] + added, 0
