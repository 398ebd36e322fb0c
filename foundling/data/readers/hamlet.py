"""The village's own writing, in pieces: a piece is a range of documents with its share of val."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any

from foundling.data.readers.source import Kind, Row

if TYPE_CHECKING:
    from foundling.hamlet.village import Village

PIECE_DOCUMENTS = 4096


@dataclass(frozen=True)
class HamletSource:
    """The village's own writing; val comes from its own stream, a little after every few rows."""

    chat: bool
    seed: int
    documents: int | None
    val_share: float

    @property
    def name(self) -> str:
        """As the user names it."""
        return "hamlet:chat" if self.chat else "hamlet"

    @property
    def kind(self) -> Kind:
        """Documents or conversations."""
        return "chat" if self.chat else "text"

    @property
    def draws(self) -> bool:
        """Two equal documents are two draws: the floor counts both."""
        return True

    @property
    def recipe(self) -> dict[str, Any]:
        """Four settings decide every row."""
        return {
            "source": self.name,
            "seed": self.seed,
            "documents": self.documents,
            "val_share": self.val_share,
        }

    def pieces(self) -> Iterator["HamletPiece"]:
        """Ranges of documents; without a limit they never end."""
        for start in count(0, PIECE_DOCUMENTS):
            stop = start + PIECE_DOCUMENTS
            if self.documents is not None:
                stop = min(stop, self.documents)
            if stop <= start:
                return
            yield HamletPiece(self.chat, self.seed, self.val_share, start, stop)

    def __iter__(self) -> Iterator[Row]:
        for piece in self.pieces():
            yield from piece.rows()


@dataclass(frozen=True)
class HamletPiece:
    """Documents `start` to `stop` (not included), and the held-out ones due among them."""

    chat: bool
    seed: int
    val_share: float
    start: int
    stop: int

    @property
    def name(self) -> str:
        """The documents for training that it holds."""
        return f"documents {self.start}..{self.stop - 1}"

    def identity(self) -> str:
        """Everything that decides its rows."""
        source = "hamlet:chat" if self.chat else "hamlet"
        return f"{source} seed {self.seed} {self.name} val {self.val_share!r}"

    def rows(self, tally: Counter[str] | None = None) -> Iterator[Row]:
        """Documents in order, each followed by the held-out ones that are due by then."""
        village = _village(self.seed)
        # As many as the documents before this piece have called for.
        written = math.ceil(self.start * self.val_share)
        for index in range(self.start, self.stop):
            yield self._row(village, index, "train")
            # Spread evenly, so that a build that stops at a token count has its share of val.
            while written < (index + 1) * self.val_share:
                yield self._row(village, written, "val")
                written += 1

    def _row(self, village: "Village", index: int, split: str) -> Row:
        from foundling.hamlet.conversations import conversation
        from foundling.hamlet.documents import document

        where = f"{split}:{index}"
        if self.chat:
            talk = conversation(village, self.seed, index, split)
            return Row(
                messages=talk.messages,
                source="hamlet:chat",
                where=where,
                kind=talk.kind,
                split=split,
            )
        page = document(village, self.seed, index, split)
        return Row(
            text=page.text,
            source="hamlet",
            where=where,
            kind=page.kind,
            floor_bits=page.bits,
            split=split,
        )


@lru_cache(maxsize=4)
def _village(seed: int) -> "Village":
    """A village is raised once a process, not once a piece."""
    from foundling.hamlet.village import Village

    return Village(seed)
