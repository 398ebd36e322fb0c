"""Source, Piece and Row: what every reader gives to a build, and its options."""

import hashlib
import json
import math
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol, get_args

from foundling.config.errors import ConfigError, DataError
from foundling.tokenizer.chat import Message, is_learned, role_and_content

Schema = Literal[
    "auto", "text", "messages", "sharegpt", "alpaca", "prompt-completion", "preference"
]
SCHEMAS: tuple[Schema, ...] = get_args(Schema)


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What a user may say about rows; the defaults guess."""

    text: str = ""
    """Column of the text, or of the conversation with a schema that has one ("": guess)."""
    template: str = ""
    """Text built from columns, such as "{title}\\n\\n{body}"."""
    where: tuple[str, ...] = ()
    """Row filters, which must all hold: "score>=3", "language=en", "source!=x", "title~regex"."""
    schema: str = "auto"
    """Form of the rows: auto, text, messages, sharegpt, alpaca, prompt-completion, preference."""
    max_chars: int = 10_000_000
    """Longer rows go to quarantine."""
    normalise: Literal["none", "nfc"] = "none"
    """Unicode normal form that text is brought into."""
    stream: bool = False
    """Store nothing of a remote source; the rows are the same."""
    allow_broken_files: bool = field(default=False, repr=False)
    """Reading a whole source goes on after a file that breaks off; the rows are the same, so
    it is neither in a recipe nor in what tells two pieces apart (repr)."""

    def __post_init__(self) -> None:
        if self.schema not in SCHEMAS:
            raise ConfigError(f"{self.schema!r} is no schema; use one of {', '.join(SCHEMAS)}.")
        if self.normalise not in ("none", "nfc"):
            raise ConfigError(f"normalise is {self.normalise!r}; use none or nfc.")
        if self.max_chars < 1:
            raise ConfigError(f"max_chars is {self.max_chars}; use at least 1.")
        if self.text and self.template:
            raise ConfigError("a text column and a template exclude each other; give one of them.")
        if self.template and self.schema not in ("auto", "text"):
            raise ConfigError(
                f"a template makes plain text, and the schema {self.schema} is something else;"
                " leave one out."
            )
        if self.text and self.schema in ("alpaca", "prompt-completion", "preference"):
            raise ConfigError(
                f"the schema {self.schema} has columns of its own, so a text column"
                f" ({self.text!r}) has no effect; leave one out."
            )

    def changed(self) -> dict[str, Any]:
        """What differs from the defaults and decides the rows, for a recipe."""
        same_rows = ("stream", "allow_broken_files")
        chosen = [one for one in fields(self) if one.name not in same_rows]
        values = {one.name: (getattr(self, one.name), one.default) for one in chosen}
        return {name: value for name, (value, default) in values.items() if value != default}


DEFAULTS = ReadOptions()
"""Guess everything, keep everything."""


# A Row: one document or conversation on its way into a data set, and what makes one unusable.

_HELD_OUT = hashlib.blake2b(digest_size=8, person=b"held-out")
VAL_SHARE = 0.02
"""Share of rows that is held out unless a build says otherwise."""


class Row(NamedTuple):
    """What a source yields; exactly one of `text` and `messages` is expected.

    A tuple, because nothing else that cannot be changed is made as quickly, and there are as many
    as there are documents.
    """

    text: str | None = None
    messages: Sequence[Message] | None = None
    source: str = ""
    """What it came from, as the user named it."""
    where: str = ""
    """Its place there: a file and a line, an index."""
    kind: str = "text"
    """Kind of document, by which scores are listed."""
    floor_bits: float | None = None
    """Bits that the best possible model needs for it, where known."""
    split: str | None = None
    """train or val where the source decides; None leaves it to a hash of the content."""
    problem: str | None = None
    """Why the reader could not make sense of it; such a row goes to quarantine, and what is in
    `text` is only a sample of it."""
    lost: int | None = None
    """Of the row at which its file breaks off: rows after it that are lost, as far as that can be
    told. None of every other row."""


def broken_off(where: str, reason: str) -> str:
    """The refusal of a file that breaks off, unless that is allowed."""
    return (
        f"{where}: {reason}; fetch the file again, or use what comes before with"
        " --allow-broken-files."
    )


def unusable(row: Row, chat: bool) -> str | None:
    """Why a row cannot become tokens, in a few words; None if it can."""
    if row.problem is not None:
        return row.problem
    if row.split not in (None, "train", "val"):
        return f"split is {row.split!r}"
    if not chat:
        return _bad_text(row.text)
    messages: Any = row.messages  # what a file holds may be anything
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        return "no messages"
    try:
        turns = [role_and_content(message) for message in messages]
    except DataError as error:
        return str(error)[:200]
    except RecursionError:  # the error shows the content, which may be nested without end
        return "a message is nested too deeply"
    if all(role != "assistant" for role, _ in turns):
        return "no assistant turn"
    if not any(map(is_learned, messages)):
        return "no assistant turn to learn: each has the weight 0"
    return next((bad for _, content in turns if (bad := _bad_text(content))), None)


def _bad_text(text: object) -> str | None:
    if text is None:
        return "no text"
    if not isinstance(text, str):
        return f"text is {type(text).__name__}"
    if not text or text.isspace():
        return "empty"
    if "\x00" in text:
        return "NUL"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "lone surrogate"
    return None


def text_bytes(row: Row) -> int:
    """UTF-8 bytes that a score in bits per byte divides by: the text, or what a chat teaches."""
    if row.text is not None:
        return len(row.text.encode())
    turns = map(role_and_content, filter(is_learned, row.messages or ()))
    return sum(len(content.encode()) for _, content in turns)


def is_held_out(row: Row, val_share: float) -> bool:
    """Whether a row belongs to val: as its source says, else by a hash of its content.

    The hash depends on nothing but the content, so a row is on the same side in every build for
    ever, and so are its exact duplicates.
    """
    if row.split is not None:
        return row.split == "val"
    if row.text is not None:
        content = row.text
    else:
        content = json.dumps([role_and_content(message) for message in row.messages or ()])
    state = _HELD_OUT.copy()
    state.update(content.encode())
    return int.from_bytes(state.digest()) < math.ceil(val_share * 2**64)


def excerpt(row: Row, length: int = 200) -> str:
    """The beginning of a row, as quarantine shows it."""
    if row.messages is not None:
        return shortened(row.messages, length)
    return row.text[:length] if isinstance(row.text, str) else shortened(row.text, length)


def shortened(value: object, length: int = 200) -> str:
    """The beginning of a value, which may be anything at all."""
    try:
        return json.dumps(value, default=repr)[:length]
    except (ValueError, TypeError, RecursionError):
        return f"({type(value).__name__} that cannot be shown)"


# What a source is to a build: a name, a kind, a recipe, and pieces that can be read in any order.
#
# A piece is one idempotent task: the same rows each time it is read, in any process and on any
# machine, so it must pickle. All pieces one after another are the source. Rejected: one long
# iterator of rows, which only one process can read, and only from its beginning.

Kind = Literal["text", "chat"]

FILTERED = "filtered"
"""Tally: rows that a filter of the user left out."""
REJECTED = "rejected"
"""Tally: rejected answers of preference data that were left out."""


class Piece(Protocol):
    """A part of a source: one task of a build."""

    @property
    def name(self) -> str:
        """Stable, and unique within the source."""
        ...

    def rows(self, tally: Counter[str] | None = None) -> Iterator[Row]:
        """The rows, in order and the same each time; `tally` counts what never becomes a row."""
        ...

    def identity(self) -> str:
        """A text that changes when the rows may have changed."""
        ...


class Source(Protocol):
    """Rows with a name and a recipe."""

    @property
    def name(self) -> str:
        """As the user knows it."""
        ...

    @property
    def kind(self) -> Kind:
        """Documents or conversations; never both."""
        ...

    @property
    def recipe(self) -> dict[str, Any]:
        """Everything that decides the rows, as JSON: the same recipe means the same rows."""
        ...

    @property
    def draws(self) -> bool:
        """Whether rows are draws of a distribution, of which equal ones are never dropped."""
        ...

    def pieces(self) -> Iterator[Piece]:
        """The parts in order, made as they are asked for; there may be no end."""
        ...

    def __iter__(self) -> Iterator[Row]:
        """All rows of all pieces."""
        ...


class File(Protocol):
    """A file that can be opened again and again, here or elsewhere; it must pickle.

    What another try might mend (a lost connection, a full disk) must be raised as a DataError:
    any other error while reading is taken for damage in the file, which quarantine notes.
    """

    @property
    def name(self) -> str:
        """Its name within the source, folders included; the suffixes say the format."""
        ...

    @property
    def local(self) -> str | None:
        """Where it lies on this machine, if it does: such a file can be cut into pieces."""
        ...

    def open(self) -> BinaryIO:
        """From the first byte; Parquet and Arrow files need one that can seek."""
        ...

    def identity(self) -> str:
        """A text that changes when the bytes do, such as a checksum."""
        ...


# Rows that a program hands over, dressed as a source of one piece that stays in this process.


@dataclass(frozen=True, eq=False)
class InMemorySource:
    """Both the source and its piece."""

    name: str
    kind: Literal["text", "chat"]
    recipe: dict[str, Any]
    given: Iterable[Row]
    draws: bool = False

    def pieces(self) -> Iterator["InMemorySource"]:
        """All rows."""
        yield self

    def rows(self, tally: Counter[str] | None = None) -> Iterator[Row]:
        """As they were given."""
        return iter(self.given)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.given)

    def identity(self) -> str:
        """What the rows are; rows that can be read only once are never the same again."""
        if not isinstance(self.given, Sequence):
            return uuid.uuid4().hex
        state = hashlib.blake2b(digest_size=16)
        for row in self.given:
            state.update(repr(row).encode("utf-8", "surrogatepass"))
        return state.hexdigest()


def as_sources(
    given: "Source | Sequence[Source] | Iterable[Row]",
    name: str | None,
    kind: Literal["text", "chat"] | None,
    recipe: dict[str, Any] | None,
) -> "tuple[Source, ...]":
    """What a build was given, as sources of one kind."""
    several: Any = given if isinstance(given, Sequence) else (given,)
    if not several or not all(hasattr(one, "pieces") for one in several):
        rows: Any = given
        several = (InMemorySource(name or "rows", kind or "text", recipe or {}, rows),)
    kinds = {source.kind: source.name for source in several}
    if len(kinds) > 1:
        raise DataError(
            f"{kinds['text']} holds text and {kinds['chat']} conversations; build a data set of"
            " each."
        )
    return tuple(several)
