"""A splitting pattern of tokenizer.json, rewritten so that tiktoken's engine cuts as its own does.

Both engines try alternatives in order, repeat greedily and take the leftmost match; they differ in
their Unicode tables, in case folding, and in corners of the syntax. So a pattern is read with a
small grammar, of which each part means the same in both, and refused where it leaves it:

    alternatives |, groups (...) (?:...) (?i:...), lookahead (?=...) (?!...),
    ? * + and their lazy and possessive forms, {m} {m,} {m,n},
    literals, classes [...], \\s \\d \\w \\p{...} and their opposites, and the dot

Every part that matches one character is compared over all of Unicode; where the engines differ, the
class is written out as the first one knows it. Two patterns that are built alike from equal parts
match alike. What is left over between matches is a piece to `tokenizers` and dropped by tiktoken:
the encoder counts bytes, so that is seen in the text where it happens.
"""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from foundling.tokenizer.codepoints import Codes, in_tiktoken, in_tokenizers, marked, written
from foundling.tokenizer.unproved import UnprovedError

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What ByteLevel(use_regex=True) splits by."""

_META = frozenset("\\^$.|?*+()[]{}")
_CLASS = re.compile(r"\[\^?(?:\\.|[^\[\]\\])+\]")
_ESCAPE = re.compile(r"\\(?:[sSdDwWnrt]|[pP]\{\^?\w+\}|[^\w\s])", re.ASCII)
_COUNT = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_GROUP = re.compile(r"\((?:\?(?:[:=!]|i:))?")
# Two ASCII letters that a single character folds to, such as the ligature of f and i.
_FOLDED = re.compile("ff|fi|fl|ss|st", re.IGNORECASE)
_AFTER_GROUP = re.compile(r"\)(?:[?*+]*|\{[\d,]*\})$")


class _Part(NamedTuple):
    """A piece of pattern, rewritten."""

    text: str
    shortest: int
    """Characters of its shortest match."""
    plain: bool
    """Whether Rust's regex can match it by itself, without the slower machine for lookahead."""


@dataclass
class Translation:
    """A pattern for tiktoken, and what its parts match."""

    source: str
    atoms: dict[str, Codes] = field(default_factory=dict)
    """Every part that matches one character, with the code points it matches."""
    text: str = ""
    _at: int = 0

    def __post_init__(self) -> None:
        parts = self._alternatives(fold=False)
        if self._at < len(self.source):
            raise self._unknown(self.source[self._at])
        if not all(part.shortest for part in parts):
            raise UnprovedError("its pattern can match nothing at all")
        # Neighbours without lookahead are one group: a single search instead of one for each.
        groups: list[list[_Part]] = []
        for part in parts:
            if groups and part.plain and groups[-1][-1].plain:
                groups[-1].append(part)
            else:
                groups.append([part])
        self.text = "|".join(
            group[0].text if len(group) == 1 else f"(?:{'|'.join(part.text for part in group)})"
            for group in groups
        )

    def _alternatives(self, fold: bool) -> list[_Part]:
        parts = [self._sequence(fold)]
        while self._peek() == "|":
            self._at += 1
            parts.append(self._sequence(fold))
        return parts

    def _sequence(self, fold: bool) -> _Part:
        text, shortest, plain = "", 0, True
        while self._peek() not in ("", "|", ")"):
            part = self._counted(self._term(fold))
            text += part.text
            shortest += part.shortest
            plain &= part.plain
        return _Part(text, shortest, plain)

    def _term(self, fold: bool) -> _Part:
        """A group, or a part that matches one character."""
        character = self._peek()
        if character == "(":
            return self._group(fold)
        shape = {"[": _CLASS, "\\": _ESCAPE}.get(character)
        if shape is not None:
            match = shape.match(self.source, self._at)
            if match is None:
                raise self._unknown(self.source[self._at : self._at + 8])
            self._at = match.end()
            return self._atom(match[0], fold)
        if character in _META and character != ".":
            raise self._unknown(character)
        self._at += 1
        if fold or character == ".":
            return self._atom(character, fold)
        self.atoms[character] = marked(character)
        return _Part(character, 1, True)

    def _atom(self, atom: str, fold: bool) -> _Part:
        if fold and not atom.isascii():
            raise UnprovedError(f"its pattern ignores the case of {atom}")
        asked = f"(?i:{atom})" if fold else atom
        codes = self.atoms[asked] = in_tokenizers(asked)
        if not codes.any():
            raise self._unknown(atom)
        return _Part(asked if not fold and _same(asked, codes) else written(codes), 1, True)

    def _group(self, fold: bool) -> _Part:
        match = _GROUP.match(self.source, self._at)
        assert match is not None
        start = self._at = match.end()
        opening = match[0]
        if opening == "(" and self._peek() == "?":
            raise self._unknown(self.source[start - 1 : start + 2])
        folds = opening == "(?i:"
        parts = self._alternatives(fold or folds)
        if self._peek() != ")":
            raise self._unknown(opening)
        if folds and (
            _FOLDED.search(self.source[start : self._at])
            or _AFTER_GROUP.search(self.source[: match.start()])
        ):
            raise UnprovedError(f"its pattern ignores the case of {self.source[start : self._at]}")
        self._at += 1
        ahead = opening in ("(?=", "(?!")
        if ahead and self._peek() and self._peek() in "?*+{":
            raise self._unknown(")" + self._peek())
        inside = "|".join(part.text for part in parts)
        return _Part(
            f"{opening if ahead else '(?:'}{inside})",
            0 if ahead else min(part.shortest for part in parts),
            not ahead and all(part.plain for part in parts),
        )

    def _counted(self, part: _Part) -> _Part:
        """The part with how often it may come."""
        count = self._peek()
        shortest, plain = part.shortest, part.plain
        if count == "{":
            match = _COUNT.match(self.source, self._at)
            if match is None:
                raise self._unknown(self.source[self._at : self._at + 8])
            count = match[0]
            shortest *= int(match[1])
        elif count and count in "?*+":
            shortest *= count == "+"
            after = self.source[self._at + 1 : self._at + 2]
            if after and after in "?+":
                plain &= after == "?"
                count += after
        else:
            return part
        self._at += len(count)
        # {2}+ is possessive to one engine and a repeated repetition to the other.
        if self._peek() and self._peek() in "?*+{":
            raise self._unknown(count + self._peek())
        return _Part(part.text + count, shortest, plain)

    def _peek(self) -> str:
        return self.source[self._at : self._at + 1]

    def _unknown(self, what: str) -> UnprovedError:
        return UnprovedError(
            f"its pattern has {what!r}, which the two engines may read differently"
        )


def _same(atom: str, codes: Codes) -> bool:
    """Whether tiktoken's engine reads the atom, and as the other one does."""
    try:
        return bool((in_tiktoken(atom) == codes).all())
    except UnprovedError:
        return False
