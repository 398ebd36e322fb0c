"""From what a file holds to a Row: well-typed text or turns, or a problem with its reason.

No value, however odd, may raise here: whatever cannot be used becomes a row with a problem, which
quarantine notes with its place.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from foundling.config.errors import ConfigError
from foundling.data.rows import Row, Texts, shortened
from foundling.data.sources.base import FILTERED, REJECTED
from foundling.data.sources.chats import Turns, Unfit, conversation, is_rejected, unwanted
from foundling.data.sources.filters import Filter, lookup
from foundling.data.sources.layout import Layout
from foundling.data.sources.options import ReadOptions

NOT_UTF8 = "not UTF-8"
TOO_LONG = "over the limit"
NO_TEXT = "neither text nor messages"

_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


class Bad(NamedTuple):
    """What stands where a row should be."""

    reason: str
    sample: str | None = None


def template_fields(template: str) -> tuple[str, ...]:
    """The columns that a template names."""
    fields: list[str] = []
    for match in _FIELD.finditer(template):
        if match[1]:
            fields.append(match[1])
        elif match[0] not in ("{{", "}}"):
            raise ConfigError(
                f"the template {template!r} is not understood at {match[0]!r}; write columns as"
                " {name} and a brace of the text twice."
            )
    if template and not fields:
        raise ConfigError(f"the template {template!r} names no column; write one as {{name}}.")
    return tuple(fields)


class Maker:
    """Makes rows of one file."""

    def __init__(
        self, *, source: str, file: str, layout: Layout, options: ReadOptions, tally: Counter[str]
    ) -> None:
        self.source = source
        self.file = file
        self.layout = layout
        self.tally = tally
        self.max_chars = options.max_chars
        self.fields = template_fields(options.template)
        self.nfc = options.normalise == "nfc"
        # A shell hands over \n as two characters.
        self.template = options.template.replace("\\n", "\n").replace("\\t", "\t")

    def bad(
        self, reason: str, place: int, sample: str | None = None, lost: int | None = None
    ) -> Row:
        """A row that only quarantine will see."""
        where = f"{self.file}:{place}"
        return Row(text=sample, source=self.source, where=where, problem=reason, lost=lost)

    def text(self, text: Any, place: int) -> Row:
        """A document."""
        if not isinstance(text, str):
            if not isinstance(text, bytes):
                reason = "no text" if text is None else f"text is {type(text).__name__}"
                return self.bad(reason, place, None if text is None else shortened(text))
            try:
                text = text.decode()
            except UnicodeDecodeError:
                return self.bad(NOT_UTF8, place, text[:200].decode("utf-8", "backslashreplace"))
        if len(text) > self.max_chars:
            return self.bad(f"{TOO_LONG} of {self.max_chars} characters", place, text[:200])
        if self.nfc and not text.isascii():
            text = unicodedata.normalize("NFC", text)
        return Row(text=text, source=self.source, where=f"{self.file}:{place}")

    def texts(self, values: list[Any], places: Sequence[int]) -> Texts | None:
        """Documents together, if nothing is to be said about any of them."""
        if not values or not all(type(value) is str for value in values):
            return None
        if max(map(len, values)) > self.max_chars:
            return None
        if self.nfc:
            values = [
                value if value.isascii() else unicodedata.normalize("NFC", value)
                for value in values
            ]
        return Texts(values, self.source, self.file, places)

    def record(self, value: object, place: int, filters: tuple[Filter, ...] = ()) -> Row | None:
        """Whatever a file held in one place; None where it is left out on purpose."""
        if isinstance(value, Bad):
            return self.bad(value.reason, place, value.sample)
        if isinstance(value, dict):
            if not all(filter.accepts(value) for filter in filters):
                self.tally[FILTERED] += 1
                return None
            if self.layout.kind == "chat":
                return self._chat(value, place)
            if self.template:
                return self._filled(value, place)
            if self.layout.columns:
                return self.text(lookup(value, self.layout.columns[0]), place)
        elif isinstance(value, str) and self.layout.kind == "text" and not self.template:
            return self.text(value, place)
        return self.bad(NO_TEXT, place, shortened(value))

    def _filled(self, row: Mapping[str, Any], place: int) -> Row:
        """The template with the row's values in it."""
        missing: list[str] = []

        def put(match: re.Match[str]) -> str:
            if not match[1]:
                return match[0][0]
            value = lookup(row, match[1])
            if value is None or isinstance(value, list | dict | bytes):
                missing.append(match[1])
                return ""
            return value if isinstance(value, str) else str(value)

        text = _FIELD.sub(put, self.template)
        if missing:
            return self.bad(f"nothing to write for `{missing[0]}`", place, shortened(row))
        return self.text(text, place)

    def _chat(self, row: Mapping[str, Any], place: int) -> Row | None:
        """A conversation; only the chosen side of a pair, and nothing that a label rejects."""
        if unwanted(self.layout, row):
            self.tally[REJECTED] += 1
        if self.layout.schema != "preference" and is_rejected(row):
            return None
        try:
            turns = conversation(self.layout, row)
        except Unfit as verdict:
            return self.bad(str(verdict), place, shortened(row))
        if sum(len(turn["content"]) for turn in turns) > self.max_chars:
            return self.bad(f"{TOO_LONG} of {self.max_chars} characters", place, shortened(row))
        return Row(
            messages=self._normal(turns),
            source=self.source,
            where=f"{self.file}:{place}",
            kind="chat",
        )

    def _normal(self, turns: Turns) -> Turns:
        if self.nfc:
            for turn in turns:
                turn["content"] = unicodedata.normalize("NFC", turn["content"])
        return turns
