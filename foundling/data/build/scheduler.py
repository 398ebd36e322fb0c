"""Who does what in phase 1, and how far the parts reach without a gap.

Every later decision (which of two equal documents stays, where a budget of tokens ends) is taken in
one order that workers, engines and interruptions cannot change: the pieces of a source in turn, the
parts of a piece in turn, and with several sources a part of each in turn. Parts may be finished in
any order; the frontier is the run from the first part on that is there without a gap.

Rejected: turns by whole piece among sources. A piece can be a file of a billion tokens, and a
budget of ten million would then never reach the second source.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from foundling.data.build.encode import TAKEN, EncodeJob, parts_in_all
from foundling.data.build.part_files import PartInfo, is_whole, read_info
from foundling.runtime.console import console, is_rank_zero, say

if TYPE_CHECKING:
    from foundling.data.readers.source import Piece, Source


@dataclass(eq=False)
class BuildTask:
    """A piece, and what is known of its parts."""

    piece: "Piece"
    folder: Path
    parts: dict[int, PartInfo] = field(default_factory=dict)
    """Those that are on disk and that the frontier has not passed."""
    passed: int = 0
    """How many the frontier has passed."""
    in_all: int | None = None
    """How many there are, once the piece was read to its end."""

    def scan(self, *, check: bool = False) -> None:
        """Look at the disk for parts; a damaged one is taken for absent. What an earlier start left
        is read to `check` it: the machine may have been cut off since."""
        for path in self.folder.glob(f"*{TAKEN}") if check else ():
            path.unlink()
        self.in_all = parts_in_all(self.folder)
        for path in sorted(self.folder.glob("*.arrow")):
            number = int(path.stem)
            if number < self.passed or number in self.parts:
                continue
            info = read_info(path) if not check or is_whole(path) else None
            if info is not None:
                self.parts[number] = info
            elif check:  # later, a part that cannot be read now may be a good one
                path.unlink()

    @property
    def done(self) -> bool:
        """Whether every part is there."""
        return self.in_all is not None and self.passed + len(self.parts) == self.in_all

    def holds(self, number: int) -> bool:
        """Whether a part is there."""
        return number < self.passed or number in self.parts


@dataclass(frozen=True)
class PlacedPart:
    """A part in its place in the order."""

    info: PartInfo
    draws: bool
    """Its documents are draws of a distribution, of which equal ones all count."""
    source: int = 0
    """Number of its source."""


class _Lane:
    """One source's pieces, opened as they are needed."""

    def __init__(self, number: int, source: "Source", job: EncodeJob, folder: Path) -> None:
        self.number = number
        self.draws = source.draws
        self.tasks: list[BuildTask] = []
        self.at = 0
        """The piece in which the frontier stands."""
        self.all_open = False
        self._pieces: Iterator[Piece] = source.pieces()
        self._job = job
        self._folder = folder

    def open(self) -> BuildTask | None:
        """The next piece; None if there is none."""
        piece = next(self._pieces, None)
        if piece is None:
            self.all_open = True
            return None
        name = f"{self.number}-{len(self.tasks):06d}-{self._job.mark(piece.identity())}"
        task = BuildTask(piece, self._folder / name)
        task.scan(check=True)
        self.tasks.append(task)
        return task

    def current(self) -> BuildTask | None:
        """The piece that the frontier waits for, past those that it is through with."""
        while self.at < len(self.tasks):
            task = self.tasks[self.at]
            if task.passed != task.in_all:
                return task
            self.at += 1
        return None

    @property
    def ended(self) -> bool:
        return self.all_open and self.current() is None


class Scheduler:
    """The pieces of all sources and the parts that are there."""

    def __init__(self, sources: Sequence["Source"], job: EncodeJob, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.sources = sources
        self._lanes = [_Lane(n, source, job, folder) for n, source in enumerate(sources)]
        self._turn = 0
        self._open_turn = 0
        self.reached: list[PlacedPart] = []
        """The frontier's parts, in the order that decides."""
        self.train_tokens = 0
        """Of the frontier, before anything is dropped."""
        self.rows = 0
        self.bad = 0
        self.documents = 0
        self.tokens = 0
        self.text_bytes = 0

    def open_task(self) -> BuildTask | None:
        """The next piece with parts missing, the sources taking turns; None if all are open."""
        while not all(lane.all_open for lane in self._lanes):
            lane = self._lanes[self._open_turn % len(self._lanes)]
            self._open_turn += 1
            task = None if lane.all_open else lane.open()
            if task is not None and not task.done:
                return task
        return None

    def wanted(self) -> BuildTask | None:
        """The piece whose next part the frontier waits for; None if there is nothing to come."""
        self.advance()
        while not self.exhausted:
            lane = self._lanes[self._turn]
            task = lane.current() or lane.open()
            if task is not None and not task.holds(task.passed):
                return task
            self.advance()
        return None

    def advance(self) -> None:
        """Move the frontier over every part that is there."""
        while not self.exhausted:
            lane = self._lanes[self._turn]
            if not lane.ended:
                task = lane.current()
                if task is None or task.passed not in task.parts:
                    return
                self._pass(lane, task)
            self._turn = (self._turn + 1) % len(self._lanes)

    def _pass(self, lane: _Lane, task: BuildTask) -> None:
        info = task.parts.pop(task.passed)
        task.passed += 1
        self.reached.append(PlacedPart(info, lane.draws, lane.number))
        self.train_tokens += info.train_tokens
        self.rows += info.rows
        self.bad += info.bad
        self.documents += info.documents
        self.tokens += info.tokens
        self.text_bytes += info.text_bytes

    @property
    def pieces_done(self) -> int:
        """Pieces that the frontier is through with."""
        return sum(lane.at for lane in self._lanes)

    @property
    def exhausted(self) -> bool:
        """Whether the frontier has come to the end of every source."""
        return all(lane.ended for lane in self._lanes)


# How far a build has come: counted here, shown by the caller.

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
    def of(cls, scheduler: Scheduler, budget: int | None, pieces: int | None) -> "Progress":
        """Everything that is on disk, beyond the frontier too."""
        tokens = scheduler.tokens
        share = None
        if budget is not None:
            share = min(1.0, scheduler.train_tokens / budget)
        elif pieces:
            share = min(1.0, scheduler.pieces_done / pieces)
        return cls(
            scheduler.documents, tokens, scheduler.rows, scheduler.bad, scheduler.text_bytes, share
        )


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


class BuildProgress(AbstractContextManager["BuildProgress"]):
    """Shows progress: one line that changes on a terminal, a line now and then elsewhere."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._first: Progress | None = None
        self._last = self._began
        self._live: Any = None

    def __enter__(self) -> "BuildProgress":
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
