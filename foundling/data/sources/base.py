"""What a source is to a build: a name, a kind, a recipe, and pieces that can be read in any order.

A piece is one idempotent task: the same rows each time it is read, in any process and on any
machine, so it must pickle. All pieces one after another are the source. Rejected: one long iterator
of rows, which only one process can read and nobody can read again from the middle.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal, Protocol

from foundling.data.rows import Row

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
