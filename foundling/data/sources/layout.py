"""What the columns of a file mean: found from their names, or refused with a sentence.

The order of the table below is the order of guessing, from the most telling names to the least; a
schema that the user names is looked for alone. A source is documents or conversations, never both:
a file that holds both kinds, or neither, is refused before anything is built.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from foundling.config.errors import DataError
from foundling.data.sources.base import Kind
from foundling.data.sources.filters import Filter
from foundling.data.sources.options import ReadOptions

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
class Layout:
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


PLAIN = Layout("text", ())


def layout_of(names: Collection[str], options: ReadOptions) -> Layout | None:
    """The first schema that columns of these names fit."""
    if options.template:
        return PLAIN
    if options.text:
        schema = "text" if options.schema == "auto" else options.schema
        return Layout(schema, (options.text,)) if has(names, options.text) else None
    for schema, columns in _candidates(options.schema):
        if all(column in names for column in columns):
            return Layout(schema, columns)
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


def settle(
    file: str, rows: Sequence[Collection[str]], strings: int, options: ReadOptions
) -> Layout | None:
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
    """Refuse a column that is read and is there twice: nobody can say which of the two counts."""
    for column in columns:
        if columns.count(column) > 1:
            raise DataError(
                f"{file} has two columns named `{column}`; rename one, or name another with --text."
            )


def columns_to_read(
    names: Sequence[str], layout: Layout, fields: Iterable[str], filters: Iterable[Filter]
) -> list[str]:
    """Which columns of a table are worth reading."""
    wanted = (*layout.reads(), *fields, *(filter.column for filter in filters))
    return [
        name
        for name in names
        if any(name == column or column.startswith(f"{name}.") for column in wanted)
    ]
