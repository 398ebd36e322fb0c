"""Who does what in phase 1, and how far the parts reach without a gap.

Every later decision (which of two equal documents stays, where a budget of tokens ends) is taken in
one order that workers, engines and interruptions cannot change: the pieces of a source in turn, the
parts of a piece in turn, and with several sources a part of each in turn. Parts may be finished in
any order; the frontier is the run from the first part on that is there without a gap.

Rejected: turns by whole piece among sources. A piece can be a file of a billion tokens, and a
budget of ten million would then never reach the second source.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from foundling.data.spool import PartInfo, is_whole, read_info
from foundling.data.tasks import Job, parts_in_all

if TYPE_CHECKING:
    from foundling.data.sources.base import Piece, Source


@dataclass(eq=False)
class Task:
    """A piece, and what is known of its parts."""

    piece: "Piece"
    folder: Path
    parts: dict[int, PartInfo] = field(default_factory=dict)
    """Those that are on disk and that the frontier has not passed."""
    passed: int = 0
    """How many the frontier has passed."""
    in_all: int | None = None
    """How many there are, once somebody has read the piece to its end."""

    def scan(self, *, check: bool = False) -> None:
        """Look at the disk for parts; a damaged one is taken for absent. What an earlier start left
        is read to `check` it: the machine may have been cut off since."""
        self.in_all = parts_in_all(self.folder)
        for path in sorted(self.folder.glob("*.arrow")):
            number = int(path.stem)
            if number < self.passed or number in self.parts:
                continue
            info = read_info(path) if not check or is_whole(path) else None
            if info is None:
                path.unlink()
            else:
                self.parts[number] = info

    @property
    def done(self) -> bool:
        """Whether every part is there."""
        return self.in_all is not None and self.passed + len(self.parts) == self.in_all

    def holds(self, number: int) -> bool:
        """Whether a part is there."""
        return number < self.passed or number in self.parts


@dataclass(frozen=True)
class Reached:
    """A part in its place in the order."""

    info: PartInfo
    draws: bool
    """Its documents are draws of a distribution, of which equal ones all count."""
    source: int = 0
    """Number of its source."""


class _Lane:
    """One source's pieces, opened as they are needed."""

    def __init__(self, number: int, source: "Source", job: Job, folder: Path) -> None:
        self.number = number
        self.draws = source.draws
        self.tasks: list[Task] = []
        self.at = 0
        """The piece in which the frontier stands."""
        self.all_open = False
        self._pieces: Iterator[Piece] = source.pieces()
        self._job = job
        self._folder = folder

    def open(self) -> Task | None:
        """The next piece; None if there is none."""
        piece = next(self._pieces, None)
        if piece is None:
            self.all_open = True
            return None
        name = f"{self.number}-{len(self.tasks):06d}-{self._job.mark(piece.identity())}"
        task = Task(piece, self._folder / name)
        task.scan(check=True)
        self.tasks.append(task)
        return task

    def current(self) -> Task | None:
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


class Board:
    """The pieces of all sources and the parts that are there."""

    def __init__(self, sources: Sequence["Source"], job: Job, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.sources = sources
        self._lanes = [_Lane(n, source, job, folder) for n, source in enumerate(sources)]
        self._turn = 0
        self._open_turn = 0
        self.reached: list[Reached] = []
        """The frontier's parts, in the order that decides."""
        self.train_tokens = 0
        """Of the frontier, before anything is dropped."""
        self.rows = 0
        self.bad = 0
        self.documents = 0
        self.tokens = 0
        self.text_bytes = 0

    def open_task(self) -> Task | None:
        """The next piece with parts missing, the sources taking turns; None if all are open."""
        while not all(lane.all_open for lane in self._lanes):
            lane = self._lanes[self._open_turn % len(self._lanes)]
            self._open_turn += 1
            task = None if lane.all_open else lane.open()
            if task is not None and not task.done:
                return task
        return None

    def wanted(self) -> Task | None:
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

    def _pass(self, lane: _Lane, task: Task) -> None:
        info = task.parts.pop(task.passed)
        task.passed += 1
        self.reached.append(Reached(info, lane.draws, lane.number))
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

    def refresh(self) -> None:
        """Look at the disk for what others have finished."""
        for lane in self._lanes:
            for task in lane.tasks[lane.at :]:
                if not task.done:
                    task.scan()
        self.advance()
