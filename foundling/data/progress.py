"""How far a build has come: counted here, shown by whoever started it."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any

from foundling.data.board import Board
from foundling.runtime.log import console, is_rank_zero, say

if TYPE_CHECKING:
    from foundling.data.sources.base import Source

MOST_PIECES = 10_000
"""Sources of more pieces are not counted through for the sake of an estimate."""
EVERY_S = 10.0
"""Between plain lines; a terminal is refreshed as parts come in."""


@dataclass(frozen=True)
class Progress:
    """What phase 1 has done so far."""

    documents: int
    tokens: int
    rows: int
    bad: int
    text_bytes: int
    share: float | None
    """Of the whole, from 0 to 1, where that is known."""

    @classmethod
    def of(cls, board: Board, budget: int | None, pieces: int | None) -> "Progress":
        """Everything that is on disk, beyond the frontier too."""
        tokens = board.tokens
        share = None
        if budget is not None:
            share = min(1.0, board.train_tokens / budget)
        elif pieces:
            share = min(1.0, board.pieces_done / pieces)
        return cls(board.documents, tokens, board.rows, board.bad, board.text_bytes, share)


def total_pieces(sources: "Sequence[Source]") -> int | None:
    """How many pieces there are; None where counting them is not cheap or has no end."""
    count = 0
    for source in sources:
        files = getattr(source, "files", None)
        if files is None or getattr(source, "documents", None) is not None:
            return None
        if not all(getattr(file, "local", None) for file in files):
            return None
        count += sum(1 for _ in islice(source.pieces(), MOST_PIECES + 1 - count))
        if count > MOST_PIECES:
            return None
    return count


class Meter(AbstractContextManager["Meter"]):
    """Shows progress: one line that changes on a terminal, a line now and then elsewhere."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._first: Progress | None = None
        self._last = self._began
        self._live: Any = None

    def __enter__(self) -> "Meter":
        if console().is_terminal and is_rank_zero():
            from rich.live import Live

            self._live = Live(console=console(), transient=True, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, now: Progress) -> None:
        """Take note, and show it if it is time."""
        moment = self._clock()
        if self._first is None:  # what an earlier start did is not this one's speed
            self._first, self._began = now, moment
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text(self.line(now, moment)))
        elif moment - self._last >= EVERY_S and now.documents:
            self._last = moment
            say(self.line(now, moment))

    def line(self, now: Progress, moment: float) -> str:
        """One line about it."""
        first = self._first or now
        spent = max(moment - self._began, 1e-9)
        documents = (now.documents - first.documents) / spent
        tokens = (now.tokens - first.tokens) / spent
        text = (
            f"  {now.documents:,} documents, {now.tokens:,} tokens,"
            f" {documents:,.0f} documents/s, {tokens:,.0f} tokens/s"
        )
        if now.bad:
            text += f", {now.bad:,} in quarantine"
        if now.share is None:
            return text
        done = now.share - (first.share or 0.0)
        left = f", {duration(spent * (1 - now.share) / done)} left" if done > 0 else ""
        return f"{text}, {now.share:.0%}{left}"


def duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
