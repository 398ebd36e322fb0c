"""What the columns of a file mean: found from their names, or refused with a sentence.

The order of the table below is the order of guessing, from the most telling names to the least; a
schema that the user names is looked for alone. A source is documents or conversations, never both:
a file that holds both kinds, or neither, is refused before anything is built.
"""

import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from foundling.config.errors import ConfigError, DataError
from foundling.data.readers.source import Kind, ReadOptions

# Row filters: `score>=3`, `language=en`, `source!=x`, `title~regex`.
#
# A value means the same wherever it comes from, so that Parquet and JSONL of the same rows keep the
# same rows. `!=` is exactly the opposite of `=`: a row without a value passes it, and fails every
# other filter.

_FORM = re.compile(r"([^<>=!~]+?)\s*(>=|<=|!=|==|=|>|<|~)\s*(.*)", re.DOTALL)
_ORDER: Mapping[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Filter:
    """One condition on one column."""

    column: str
    """A name, or names joined by dots for a value inside a value."""
    sign: str
    value: str

    def holds(self, value: object) -> bool:
        """Whether a row with this value is kept."""
        if self.sign == "!=":
            return not _equal(value, self.value)
        if self.sign == "=":
            return _equal(value, self.value)
        if value is None or isinstance(value, list | dict | tuple | bytes):
            return False
        if self.sign == "~":
            return re.search(self.value, _spelt(value)) is not None
        wanted = _spells(self.value)
        if wanted is None:
            return _ORDER[self.sign](_spelt(value), self.value)
        own = _number(value)
        return own is not None and _ORDER[self.sign](own, wanted)

    def accepts(self, row: Mapping[str, Any]) -> bool:
        """Whether a row is kept."""
        return self.holds(lookup(row, self.column))


def parse_filters(texts: Sequence[str]) -> tuple[Filter, ...]:
    """Filters as the user writes them."""
    return tuple(map(_parse, texts))


def _parse(text: str) -> Filter:
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"the filter {text!r} is not understood; write COLUMN, one of = != > >= < <= ~,"
            " and a value, such as score>=3."
        )
    column, sign, value = match.groups()
    if not value and sign not in ("=", "==", "!="):
        raise ConfigError(f"the filter {text!r} compares with nothing; write a value, as score>=3.")
    if sign == "~":
        try:
            re.compile(value)
        except re.error as error:
            raise ConfigError(f"the filter {text!r} has no valid pattern ({error}).") from None
    return Filter(column, "=" if sign == "==" else sign, value)


def lookup(row: Mapping[str, Any], column: str) -> Any:
    """The value under a name, or under names joined by dots; None where there is none."""
    if column in row:
        return row[column]
    value: Any = row
    for name in column.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _equal(value: object, wanted: str) -> bool:
    if isinstance(value, bool):
        return _spelt(value) == wanted.lower()
    if isinstance(value, int | float | Decimal):
        return value == _number(wanted)
    if not isinstance(value, str) or value == wanted:
        return isinstance(value, str)
    # A CSV spells what JSON holds: 3 is 3.0 in both.
    number = _spells(wanted)
    return number is not None and _spells(value) == number


def _spelt(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _number(value: object) -> int | float | Decimal | None:
    """A number, or what a text spells."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float | Decimal):
        return value
    return _spells(value) if isinstance(value, str) else None


def _spells(text: str) -> int | float | None:
    """The number that a text spells."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return None


_KNOWN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("preference", ("chosen", "rejected")),
    ("preference", ("chosen_response", "rejected_response")),
    ("preference", ("response_chosen", "response_rejected")),
    ("messages", ("messages",)),
    ("sharegpt", ("conversations",)),
    ("sharegpt", ("conversation",)),
    ("alpaca", ("instruction", "output")),
    ("alpaca", ("instruction", "response")),
    ("prompt-completion", ("prompt", "completion")),
    ("prompt-completion", ("prompt", "response")),
    ("text", ("text",)),
    ("text", ("content",)),
    ("text", ("raw_content",)),
    ("text", ("document",)),
    ("text", ("article",)),
    ("prompt-completion", ("question", "answer")),
    ("prompt-completion", ("question", "response")),
    ("prompt-completion", ("query", "response")),
    ("prompt-completion", ("problem", "solution")),
)
_OF_CHATS = ("system", "system_prompt", "tools", "label", "kto_tag")
_BESIDES: dict[str, tuple[str, ...]] = {
    "text": (),
    "messages": _OF_CHATS,
    "sharegpt": _OF_CHATS,
    "alpaca": (*_OF_CHATS, "input", "context", "history"),
    "prompt-completion": _OF_CHATS,
    "preference": (
        *(*_OF_CHATS, "conversations", "conversation", "messages", "prompt", "question", "query"),
        *("instruction", "input", "context", "history"),
    ),
}
"""Columns that a schema reads where they are there."""


@dataclass(frozen=True)
class ColumnMapping:
    """A schema and the columns it was found in."""

    schema: str
    columns: tuple[str, ...]
    """The telling ones; none for text built by a template or for rows that are text as they are."""

    @property
    def kind(self) -> Kind:
        """Documents or conversations."""
        return "text" if self.schema == "text" else "chat"

    def reads(self) -> tuple[str, ...]:
        """Every column that it looks at where it is there."""
        return (*self.columns, *_BESIDES[self.schema])


PLAIN = ColumnMapping("text", ())


def layout_of(names: Collection[str], options: ReadOptions) -> ColumnMapping | None:
    """The first schema that columns of these names fit."""
    if options.template:
        return PLAIN
    if options.text:
        schema = "text" if options.schema == "auto" else options.schema
        return ColumnMapping(schema, (options.text,)) if has(names, options.text) else None
    for schema, columns in _candidates(options.schema):
        if all(column in names for column in columns):
            return ColumnMapping(schema, columns)
    return None


def _candidates(wanted: str) -> Iterable[tuple[str, tuple[str, ...]]]:
    if wanted == "auto":
        return _KNOWN
    own = [known for known in _KNOWN if known[0] == wanted]
    if wanted in ("messages", "sharegpt"):
        # The two differ in names alone, and readers of either take both.
        own += [(wanted, columns) for name, columns in _KNOWN if name in ("messages", "sharegpt")]
    return own


def has(names: Collection[str], column: str) -> bool:
    """Whether a column, or what a dotted name begins with, is among the names."""
    return column in names or ("." in column and column.split(".")[0] in names)


def detect_columns(
    file: str, rows: Sequence[Collection[str]], strings: int, options: ReadOptions
) -> ColumnMapping | None:
    """What a file holds, from the names in its first rows; None if it has no row to tell.

    `strings` is how many of its first rows are bare text.
    """
    found = [layout_of(names, options) for names in rows]
    layouts = list(dict.fromkeys(layout for layout in found if layout is not None))
    if strings and options.schema in ("auto", "text") and not (options.template or options.text):
        layouts = layouts or [PLAIN]
        if any(layout.kind == "chat" for layout in layouts):
            raise DataError(_mixed(file, ("bare text", layouts[0].schema)))
    if len(layouts) > 1:
        raise DataError(_mixed(file, [f"{o.schema} ({', '.join(o.columns)})" for o in layouts]))
    if layouts or not (rows or strings):
        return layouts[0] if layouts else None
    raise DataError(_unknown(file, rows, options))


def _mixed(file: str, what: Sequence[str]) -> str:
    return (
        f"{file} mixes {' and '.join(what)} in its first rows; split it, or say which rows to read"
        " with --schema and --where."
    )


def _unknown(file: str, rows: Sequence[Collection[str]], options: ReadOptions) -> str:
    names = listed(name for row in rows for name in row)
    wanted = options.text or options.schema
    missing = f"no column `{wanted}`" if options.text else f"nothing of the schema {wanted}"
    if not options.text and options.schema == "auto":
        missing = "no text and no conversation that is known"
    return (
        f"{file} has {missing}: its columns are {names}; name the one with the text with --text,"
        " build the text with --template, or name the form of conversations with --schema."
    )


def listed(names: Iterable[str], most: int = 20) -> str:
    """Names once each, the first few of them."""
    # A name may be any text: shown short, and with nothing that a terminal would choke on.
    shown = (name[:40] if name.isprintable() else ascii(name[:40]) for name in names)
    once = list(dict.fromkeys(shown))
    more = f" and {len(once) - most} more" if len(once) > most else ""
    return ", ".join(once[:most]) + more if once else "none"


def check_columns(
    file: str, rows: Sequence[Collection[str]], wanted: Iterable[str], by: str
) -> None:
    """Refuse a filter or a template that names a column which no row has."""
    for column in wanted:
        if rows and not any(has(names, column) for names in rows):
            names = listed(name for row in rows for name in row)
            raise DataError(
                f"{by} names the column `{column}`, which {file} does not have: its columns are"
                f" {names}."
            )


def check_once(file: str, columns: Sequence[str]) -> None:
    """Refuse a column that is read and is there twice: it is unknown which of the two counts."""
    for column in columns:
        if columns.count(column) > 1:
            raise DataError(
                f"{file} has two columns named `{column}`; rename one, or name another with --text."
            )


def columns_to_read(
    names: Sequence[str], layout: ColumnMapping, fields: Iterable[str], filters: Iterable[Filter]
) -> list[str]:
    """Which columns of a table are worth reading."""
    wanted = (*layout.reads(), *fields, *(filter.column for filter in filters))
    return [
        name
        for name in names
        if any(name == column or column.startswith(f"{name}.") for column in wanted)
    ]
