"""Tokens to text as they come, never half a character.

A token of a byte-level vocabulary may end inside a UTF-8 sequence; decoded alone it would show as a
replacement mark. Text is held back while it ends in one, and ids are decoded together with the ones
just before them, because some tokenizers treat the beginning of a text specially.
"""

from typing import Protocol

BROKEN = "\ufffd"


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: list[int], skip_special: bool = False) -> str: ...


class TextStream:
    """Feed ids one by one; each call returns the text that has become certain."""

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []
        """The ids of the last text given out: context for the next."""
        self._held: list[int] = []
        """Ids whose text has not been given out, or not all of it."""
        self._given = 0
        """Characters of the held ids' text that were given out already."""

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished."""
        self._held.append(token)
        text = self._held_text()
        certain = text.rstrip(BROKEN)
        new = certain[self._given :]
        self._given = max(self._given, len(certain))
        if certain == text:
            self._shown, self._held, self._given = self._held, [], 0
        return new

    def close(self) -> str:
        """What is left when no more tokens come, broken characters included."""
        rest = self._held_text()[self._given :] if self._held else ""
        self._shown, self._held, self._given = [], [], 0
        return rest

    def _held_text(self) -> str:
        before = self._tokenizer.decode(self._shown, skip_special=True)
        both = self._tokenizer.decode(self._shown + self._held, skip_special=True)
        return both[len(before) :]
