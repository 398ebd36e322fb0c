"""Tokens to text as they come: never half a character, and never a part of a stop string.

A token of a byte-level vocabulary may end inside a UTF-8 sequence; decoded alone it would show as a
replacement mark. Text is held back while it ends in one, and ids are decoded together with the ones
just before them, the prompt's last at first, because some tokenizers treat the beginning of a text
specially. Text that may be
the beginning of a stop string is held back too, until it is known.
"""

from collections.abc import Sequence
from typing import Protocol

from foundling.config.errors import ConfigError

REPLACEMENT = "\ufffd"
MOST_STOPS, LONGEST_STOP = 64, 1000
CONTEXT = 8
"""Tokens of the prompt that an answer is decoded with."""


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: list[int], skip_special: bool = False) -> str: ...


class TextStream:
    """Feed ids one by one; each call returns the text that has become certain."""

    def __init__(
        self,
        tokenizer: Decoder,
        stops: Sequence[str] = (),
        *,
        prompt: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        """Of what comes after a `prompt`, without special tokens. `stops` end the text, which is
        then without them; what the first `min_tokens` bring is not looked through."""
        check_stops(stops)
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._left = min_tokens
        """Tokens to come that no stop string ends."""
        self._shown = list(prompt[-CONTEXT:])
        """The ids of the last text given out: context for the next."""
        if self._text(self._shown).endswith(REPLACEMENT):  # it ends inside a character
            self._shown = []
        self._held: list[int] = []
        """Ids whose text has not been given out, or not all of it."""
        self._given = 0
        """Characters of the held ids' text that were given out already."""
        self._pending = ""
        """Text that may be the beginning of a stop string."""
        self.stop: str | None = None
        """The stop string that ended the text."""

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished, or after a stop
        string."""
        self._held.append(token)
        self._left -= 1
        text = self._held_text()
        certain = text.rstrip(REPLACEMENT)
        new = certain[self._given :]
        self._given = max(self._given, len(certain))
        if certain == text:
            if text:  # after a token without any, what stood before it is still what was shown
                self._shown = self._held
            self._held, self._given = [], 0
        return self._until_stop(new)

    def close(self) -> str:
        """What is left when no more tokens come, broken characters included."""
        rest = self._held_text()[self._given :] if self._held else ""
        self._shown, self._held, self._given = [], [], 0
        text = self._until_stop(rest) + self._pending
        self._pending = ""
        return text

    def _until_stop(self, new: str) -> str:
        if self.stop is not None:
            return ""
        if self._left >= 0:
            return new
        text = self._pending + new
        ends = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            at, self.stop = min(ends)
            self._pending = ""
            return text[:at]
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._pending = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _held_text(self) -> str:
        return self._text(self._shown + self._held)[len(self._text(self._shown)) :]

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=True)


def check_stops(stops: Sequence[str]) -> None:
    """Refuse stop strings that are empty, too long or too many."""
    if len(stops) > MOST_STOPS:
        raise ConfigError(
            f"{len(stops):,} stop strings were given; at most {MOST_STOPS} are taken."
        )
    for stop in stops:
        if not stop:
            raise ConfigError("a stop string is empty; leave it out.")
        if len(stop) > LONGEST_STOP:
            raise ConfigError(
                f"a stop string has {len(stop):,} characters; at most {LONGEST_STOP:,} are taken."
            )


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that `stop` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
