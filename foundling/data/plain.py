"""Rows that a program hands over, dressed as a source of one piece that stays in this process."""

import hashlib
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from foundling.config.errors import DataError
from foundling.data.rows import Row

if TYPE_CHECKING:
    from foundling.data.sources.base import Source


@dataclass(frozen=True, eq=False)
class PlainRows:
    """Both the source and its piece."""

    name: str
    kind: Literal["text", "chat"]
    recipe: dict[str, Any]
    given: Iterable[Row]
    draws: bool = False

    def pieces(self) -> Iterator["PlainRows"]:
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


Given = "Source | Sequence[Source] | Iterable[Row]"


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
        several = (PlainRows(name or "rows", kind or "text", recipe or {}, rows),)
    kinds = {source.kind: source.name for source in several}
    if len(kinds) > 1:
        raise DataError(
            f"{kinds['text']} holds text and {kinds['chat']} conversations; build a data set of"
            " each."
        )
    return tuple(several)
