"""JSON that is not a value a line: one long list, or objects one after another, read as they come.

The parser of the standard library is asked first, at its full speed; where it fails, brackets and
quotes are counted to see whether the value goes on in the next block, is bad by itself, or is too
long to hold. So memory is bounded by the longest row, and a bad row costs itself alone.
"""

import codecs
import io
import json
import re
from collections.abc import Iterator
from typing import BinaryIO

from foundling.data.sources.lines import (
    BLOCK,
    ESCAPED,
    RECORD_BYTES,
    Record,
    bounded_lines,
    parsed,
)
from foundling.data.sources.making import NOT_UTF8, TOO_LONG, Bad
from foundling.data.sources.opening import Broken

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
        """One more block behind what is left of the text."""
        block = self._stream.read(BLOCK)
        self._ended = not block
        added = self._decoder.decode(block, final=self._ended)
        if not added.isascii():
            self._dirty = self._dirty or ESCAPED.search(added) is not None
        self._dropped += self._at
        self._text, self._at = self._text[self._at :] + added, 0
