"""Continuous batching: which tokens of which requests go through the model in the next step.

Requests that decode bring one token each and come first; what is left of the step's budget goes to
prompts, in pieces where they are long (chunked prefill), first come first served. A new request is
let in when there are blocks for its whole prompt. When a running one finds no block for its next
token, the one that came last gives all of its blocks back and waits at the front to be computed
again (preemption), so memory that runs short costs time and never a request.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from foundling.config.errors import ConfigError
from foundling.generate.kv_cache import BlockManager, BlockTable


@dataclass(eq=False)
class ScheduledSequence:
    """Tokens of one request on their way through the model."""

    ids: list[int]
    """The prompt and what was generated so far."""
    longest: int
    """Tokens that it may have in the end."""
    judged_from: int
    """The first token whose probability is wanted: all before it may be found in the cache. Beyond
    any length where none is."""
    table: BlockTable
    computed: int = 0
    """Tokens whose keys and values are stored."""
    reused: int | None = None
    """Tokens of the prompt that were found in the cache when it was first let in."""
    number: int = field(default=0)
    """Which request this is, in the order in which they came."""

    @property
    def is_text(self) -> bool:
        """Whether nothing will be generated behind it."""
        return self.longest == len(self.ids)


class SequenceChunk(NamedTuple):
    """The next tokens of a sequence, from the first that is not computed."""

    sequence: ScheduledSequence
    size: int
    """How many."""

    @property
    def ends(self) -> bool:
        """Whether the sequence is computed to its end, so that a token can be drawn."""
        return self.sequence.computed + self.size == len(self.sequence.ids)


class RequestScheduler:
    """Waiting and running sequences, and the plan of each step."""

    def __init__(self, blocks: BlockManager, *, step_tokens: int, max_running: int) -> None:
        self.blocks = blocks
        self.step_tokens = step_tokens
        """Tokens that go through the model in one step at most."""
        self.max_running = max_running
        """Sequences that run at a time."""
        self.waiting: deque[ScheduledSequence] = deque()
        self.running: list[ScheduledSequence] = []
        self.preemptions = 0

    def add(self, sequence: ScheduledSequence) -> None:
        """Put it at the end of the queue; one that could never run is refused."""
        if sequence.longest > self.blocks.capacity:
            raise ConfigError(
                f"a request of {sequence.longest:,} tokens, prompt and answer together, does not"
                f" fit the cache of {self.blocks.capacity:,} tokens; shorten the prompt or ask for"
                " fewer tokens."
            )
        self.waiting.append(sequence)

    def remove(self, sequence: ScheduledSequence) -> None:
        """It is finished or nobody wants it any more: its blocks are free at once."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.blocks.release(sequence.table)

    def plan(self) -> list[SequenceChunk]:
        """The next step: at least one token of whatever is there, unless nothing is."""
        budget, chunks = self.step_tokens, list[SequenceChunk]()
        decoding = sum(len(s.ids) - s.computed == 1 for s in self.running)
        at = 0
        while at < len(self.running):
            sequence = self.running[at]
            left = len(sequence.ids) - sequence.computed
            decodes = left == 1
            room = budget if decodes else budget - decoding
            decoding -= decodes
            count = min(left, room)
            if count > 0 and self._make_room(sequence, count, at):
                chunks.append(self._chunk(sequence, count))
                budget -= count
            at += 1
        self._let_in(budget, chunks)
        return chunks

    def start_again(self) -> None:
        """After a step that failed: everything computed is forgotten and computed again."""
        while self.running:
            self._preempt(self.running[-1])
        self.blocks.forget()

    def _make_room(self, sequence: ScheduledSequence, count: int, at: int) -> bool:
        """Blocks for its next tokens, from those that came later if need be."""
        wanted = sequence.computed + count
        while not self.blocks.reserve(sequence.table, sequence.computed, wanted):
            last = self.running[-1]
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _preempt(self, sequence: ScheduledSequence) -> None:
        self.running.remove(sequence)
        self.blocks.release(sequence.table)
        sequence.computed = 0
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _let_in(self, budget: int, chunks: list[SequenceChunk]) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            # The last token is always computed: what follows it is wanted.
            most = min(len(sequence.ids), sequence.judged_from) - 1
            known = self.blocks.find_prefix(sequence.table, sequence.ids, most)
            if not self.blocks.could_reserve(sequence.table, len(sequence.ids)):
                self.blocks.release(sequence.table)
                break
            count = min(left := len(sequence.ids) - known, budget)
            # A text that is only scored goes through whole if it can: its keys need no gathering.
            waits = chunks and chunks[0].sequence.is_text and count < left <= self.step_tokens
            if waits or not self.blocks.reserve(sequence.table, known, known + count):
                self.blocks.release(sequence.table)
                break
            self.waiting.popleft()
            sequence.computed = known
            if sequence.reused is None:
                sequence.reused = known
            self.running.append(sequence)
            chunks.append(self._chunk(sequence, count))
            budget -= count

    def _chunk(self, sequence: ScheduledSequence, count: int) -> SequenceChunk:
        # Named before it is computed: within a step all keys of a layer are stored before any is
        # read, so a request that begins alike shares blocks of the same step already.
        self.blocks.name_full(sequence.table, sequence.ids, sequence.computed + count)
        return SequenceChunk(sequence, count)
