"""The one thread that owns an engine: requests go in by a queue, pieces of text come out.

The event loop never waits for the engine and the engine never for a client: what a step brought is
handed to the loop in one call, each request's part goes to its ticket, and whoever streams it reads
all that has come since it last looked. A client that leaves cancels its ticket, which frees its
blocks before the next step. Rejected: a call of the loop for each piece, which at 64 streams costs
as much as a step of a small model.
"""

import asyncio
import queue
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from foundling.config.errors import ConfigError, UserError
from foundling.generate.request import Request, TokenScores
from foundling.generate.text import TextEngine, TextPiece
from foundling.runtime.console import warn
from foundling.serve.metrics import Gauges, ModelMetrics

STEP_FAILED = "the server failed on this request; its log says how."


class EngineEndedError(Exception):
    """The thread took nothing more on: a newer model has its place, or the server ends."""


class Wanted(NamedTuple):
    """One sequence that is asked for."""

    request: Request
    stops: tuple[str, ...] = ()


class Event(NamedTuple):
    """A piece of one of a ticket's sequences."""

    place: int
    """Which of the sequences."""
    piece: TextPiece
    reused: int | None = None
    """With the first piece: tokens of the prompt that were found in the cache."""
    prompt: TokenScores | None = None
    """With the first piece, where asked for: what the model thinks of the prompt."""


@dataclass(eq=False)
class Ticket:
    """Sequences that belong to one HTTP request, and what has come of them; for the loop only."""

    wanted: Sequence[Wanted]
    thread: "EngineThread"
    accepted: asyncio.Future[None]
    begun: float
    numbers: list[int] = field(default_factory=list)
    """The engine's; for its thread only."""
    left: int = 0
    """Sequences that have not ended."""
    is_closed: bool = False
    """Nobody waits for more."""
    error: Exception | None = None
    """Why it was given up before its end."""
    _ready: list[Event] = field(default_factory=list)
    _waiter: asyncio.Future[None] | None = None
    _last: dict[int, float] = field(default_factory=dict)

    async def events(self) -> list[Event]:
        """What has come since the last call, waiting for the first; none when all is over. Raises
        what it was given up for."""
        while not self._ready and self.left and not self.is_closed:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        found, self._ready = self._ready, []
        if not found and self.error is not None:
            raise self.error
        return found

    def deliver(self, event: Event, now: float) -> None:
        """Take a piece, and time it."""
        metrics = self.thread.metrics
        if event.piece.output is not None and event.piece.output.id is not None:
            metrics.generated_tokens += 1
            if event.place in self._last:
                metrics.between_tokens.add(now - self._last[event.place])
            else:
                metrics.first_token.add(now - self.begun)
            self._last[event.place] = now
        metrics.cached_tokens += event.reused or 0
        self.left -= event.piece.finish is not None
        self._ready.append(event)
        self._wake()

    def give_up(self, error: Exception) -> None:
        """End it now, if it has not ended, for this reason."""
        if self.left and not self.is_closed:
            self.error = error
        self.close()

    def close(self) -> None:
        """Nobody wants the rest."""
        if not self.is_closed:
            self.is_closed = True
            if self.left:
                self.thread.metrics.cancelled += self.left
                self.thread.cancel(self)
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineThread:
    """A thread around one TextEngine."""

    def __init__(self, text: TextEngine, name: str, metrics: ModelMetrics | None = None) -> None:
        self.text = text
        self.metrics = metrics or ModelMetrics()
        self._commands: queue.SimpleQueue[tuple[str, Ticket | None]] = queue.SimpleQueue()
        self._places: dict[int, tuple[Ticket, int]] = {}
        self._fresh: set[int] = set()
        """Sequences of which no piece has come."""
        self._lock = threading.Lock()
        self._is_over = False
        """Nothing more is taken on; under the lock."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=f"engine {name}", daemon=True)
        self._thread.start()

    # Called on the loop

    async def submit(self, wanted: Sequence[Wanted]) -> Ticket:
        """Put sequences into the queue, all or none; raises what the engine refuses them with, and
        EngineEndedError where the thread has ended."""
        self._loop = asyncio.get_running_loop()
        ticket = Ticket(wanted, self, self._loop.create_future(), time.perf_counter())
        ticket.left = len(wanted)
        with self._lock:
            if self._is_over:
                raise EngineEndedError
            self._commands.put(("submit", ticket))
        try:
            await asyncio.shield(ticket.accepted)
        except asyncio.CancelledError:
            ticket.close()
            raise
        self.metrics.requests += len(wanted)
        self.metrics.prompt_tokens += sum(len(one.request.prompt) for one in wanted)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Free what a ticket holds, before the next step."""
        self._commands.put(("cancel", ticket))

    def stop(self, *, when_idle: bool = False) -> None:
        """End the thread after this step, or when its last request has ended."""
        self._commands.put(("retire" if when_idle else "stop", None))

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join()

    def gauges(self) -> Gauges:
        """How full the engine is now."""
        engine = self.text.engine
        return {
            "waiting": ("sequences in the queue", len(engine.scheduler.waiting)),
            "running": ("sequences in the batch", len(engine.scheduler.running)),
            "blocks_used": ("cache blocks that requests hold", engine.blocks.used),
            "preemptions_total": (
                "sequences put back for lack of blocks",
                engine.scheduler.preemptions,
            ),
        }

    # The thread

    def _run(self) -> None:
        try:
            self._work()
        finally:
            with self._lock:
                self._is_over = True
            while not self._commands.empty():  # what came too late
                command, ticket = self._commands.get()
                if command == "submit" and ticket is not None:
                    self._call(_answer, ticket.accepted, EngineEndedError())

    def _work(self) -> None:
        retires = False
        engine = self.text.engine
        while True:
            while True:  # all that was asked meanwhile; if there is nothing to do, wait for it
                try:
                    command, ticket = self._commands.get(block=not engine.has_work and not retires)
                except queue.Empty:
                    break
                if command == "stop":
                    return
                if ticket is None:
                    retires = True
                elif command == "submit":
                    self._take(ticket)
                else:
                    self._drop(ticket)
            if engine.has_work:
                self._step()
            elif retires:
                return

    def _take(self, ticket: Ticket) -> None:
        error: BaseException | None = None
        try:
            for place, (request, stops) in enumerate(ticket.wanted):
                number = self.text.submit(request, stops)
                ticket.numbers.append(number)
                self._places[number] = (ticket, place)
                self._fresh.add(number)
        except UserError as refusal:
            error = refusal
        except Exception as bug:
            traceback.print_exc()
            error = bug
        if error is not None:
            self._drop(ticket)
        self._call(_answer, ticket.accepted, error)

    def _drop(self, ticket: Ticket) -> None:
        for number in ticket.numbers:
            if self._places.pop(number, None):
                self._fresh.discard(number)
                self.text.cancel(number)

    def _step(self) -> None:
        try:
            pieces = self.text.step()
        except Exception as error:
            told = str(error) if isinstance(error, ConfigError) else STEP_FAILED
            if not isinstance(error, ConfigError):
                traceback.print_exc()
            warn(f"a step failed ({type(error).__name__}); its requests are given up.")
            numbers = list(self._places)
            pieces = [TextPiece(number, "", finish="error", error=told) for number in numbers]
            for number in numbers:
                self.text.cancel(number)
            self.text.engine.forget()
        handed = [
            (self._places[piece.number][0], self._event(piece))
            for piece in pieces
            if piece.number in self._places
        ]
        for piece in pieces:
            if piece.finish:
                self._places.pop(piece.number, None)
        if handed:
            self._call(_deliver, handed)

    def _event(self, piece: TextPiece) -> Event:
        place = self._places[piece.number][1]
        if piece.number not in self._fresh:
            return Event(place, piece)
        self._fresh.discard(piece.number)
        engine = self.text.engine
        return Event(
            place, piece, engine.prompt_reused(piece.number), engine.prompt_scores(piece.number)
        )

    def _call(self, function: object, *arguments: object) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)  # type: ignore[arg-type]


def _answer(accepted: asyncio.Future[None], error: BaseException | None) -> None:
    if accepted.done():
        return
    if error is None:
        accepted.set_result(None)
    else:
        accepted.set_exception(error)


def _deliver(handed: Sequence[tuple[Ticket, Event]]) -> None:
    now = time.perf_counter()
    for ticket, event in handed:
        ticket.deliver(event, now)
