"""Steps to batches: a pure function of the step, and a thread that works ahead.

A step is the units of the order from `sample_of(step)` on, and a rank takes its slice. Their number
need not divide by anything: every rank returns as many micro-batches as the others, and rows that
are left over are fully masked. Rejected: worker processes (the work is copying, which releases the
interpreter's lock) and any state beyond the number of the step.
"""

import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from foundling.config.errors import DataError
from foundling.data.batch import Batch, BatchBuffer, Counts
from foundling.data.dataset import DataSet
from foundling.data.order import Located, Order
from foundling.data.segments import Segment

BLOCK = 4096
"""Samples located at a time: the shuffle's fixed cost is shared by many steps."""


@dataclass(frozen=True)
class RankSlice:
    """What this rank takes of every step of a segment."""

    first: int
    """Units of the step that other ranks take before it."""
    count: int
    micro_steps: int
    """Micro-batches a step, the same on every rank."""
    rows: int
    """Units of a micro-batch, as even as can be; one of a bucket's."""


class BatchReader:
    """This rank's share of every step."""

    def __init__(
        self,
        sources: Mapping[str, DataSet],
        order: Order,
        *,
        micro_tokens: int,
        rank: int = 0,
        world: int = 1,
        first_step: int = 0,
    ) -> None:
        """`micro_tokens` are the most padded tokens of a micro-batch, at least one row; data that
        is read from `first_step` on is checked here, before anything is."""
        if micro_tokens < 1 or not 0 <= rank < world:
            raise ValueError(f"no batch has {micro_tokens=} {rank=} {world=}")
        self.order = order
        self._micro_tokens, self._rank, self._world = micro_tokens, rank, world
        self._sources = dict(sources)
        current = order.segment_of_step(first_step)
        for segment in order.segments:
            if segment.first_step >= current.first_step:
                self._check(segment)
        self._block = lru_cache(maxsize=8)(self._locate_block)

    def _check(self, segment: Segment) -> None:
        """Refuse data that is not what the order was made for."""
        for name, digest in segment.digests.items():
            if name not in self._sources:
                raise DataError(f"the data order reads {name}, which is not opened; add it.")
            found = self._sources[name].digest_of(segment.shards.get(name))
            if found != digest:
                raise DataError(
                    f"{name} is not the data set the order was made for (digest {found[:12]},"
                    f" expected {digest[:12]}); bring the old one back or start a new run."
                )

    def share(self, segment: Segment) -> RankSlice:
        """How this rank's units of a step are cut into micro-batches."""
        largest = -(-segment.rows_per_step // self._world)
        at_a_time = max(1, self._micro_tokens // segment.seq_len)
        if segment.packing == "bucket":
            at_a_time = 1
        micro_steps = -(-largest // at_a_time)
        whole, left = divmod(segment.rows_per_step, self._world)
        return RankSlice(
            first=self._rank * whole + min(self._rank, left),
            count=whole + (self._rank < left),
            micro_steps=micro_steps,
            rows=-(-largest // micro_steps),
        )

    def step(self, step: int) -> list[Batch]:
        """This rank's micro-batches of optimizer step `step` (from 0)."""
        segment = self.order.segment_of_step(step)
        share = self.share(segment)
        first = self.order.sample_of(step) + share.first
        batches = []
        for number in range(share.micro_steps):
            start = number * share.rows
            count = max(0, min(share.rows, share.count - start))
            make = self._bucket if segment.packing == "bucket" else self._batch
            batches.append(make(segment, first + start, count, share.rows))
        return batches

    def _batch(self, segment: Segment, first: int, count: int, rows: int) -> Batch:
        """Units that are rows, and blank rows up to the shape."""
        buffer = BatchBuffer(rows, segment.seq_len)
        counts: dict[str, Counts] = {}
        units: dict[str, int] = {}
        if count:
            at = self._locate(first, count)
            for source in sorted(set(at.sources.tolist())):
                name = at.names[source]
                mine = np.flatnonzero(at.sources == source)
                packed = self._sources[name].packed(segment.packing_spec(name))
                counts[name] = packed.collate_into(buffer, mine, at.units[mine])
                units[name] = len(mine)
        return buffer.finished(counts, units)

    def _bucket(self, segment: Segment, first: int, count: int, rows: int) -> Batch:
        """A unit that is a micro-batch of its own shape, or a blank one."""
        if not count:
            edge = segment.buckets[0]
            return BatchBuffer(segment.bucket_tokens // edge, edge).finished({}, {})
        at = self._locate(first, 1)
        name = at.names[at.sources[0]]
        packed = self._sources[name].packed(segment.packing_spec(name))
        buffer = BatchBuffer(*packed.shape(int(at.units[0])))
        counts = packed.collate_into(buffer, np.zeros(1, np.int64), at.units)
        return buffer.finished({name: counts}, {name: 1})

    def _locate_block(self, block: int) -> Located:
        return self.order.locate_range(block * BLOCK, BLOCK)

    def _locate(self, first: int, count: int) -> Located:
        """Samples [first, first + count), from blocks that are located once."""
        low, high = first // BLOCK, (first + count - 1) // BLOCK
        blocks = [self._block(block) for block in range(low, high + 1)]
        part = slice(first - low * BLOCK, first - low * BLOCK + count)
        return Located(
            self.order.names,
            np.concatenate([block.sources for block in blocks])[part],
            np.concatenate([block.epochs for block in blocks])[part],
            np.concatenate([block.units for block in blocks])[part],
        )

    def prefetch(
        self, first_step: int, last_step: int, depth: int = 2
    ) -> Iterator[tuple[int, list[Batch]]]:
        """Steps [first_step, last_step) in order, at most `depth` prepared ahead by a thread.

        Closing the iterator, or leaving the loop, ends the thread; what goes wrong in the thread is
        raised here.
        """
        ready: queue.Queue[tuple[int, list[Batch] | BaseException]] = queue.Queue(max(1, depth))
        stop = threading.Event()

        def put(item: tuple[int, list[Batch] | BaseException]) -> bool:
            while not stop.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    return True
                except queue.Full:
                    continue
            return False

        def work() -> None:
            try:
                for step in range(first_step, last_step):
                    if not put((step, self.step(step))):
                        return
            except BaseException as error:
                put((-1, error))

        thread = threading.Thread(target=work, name="prefetch", daemon=True)
        thread.start()
        try:
            for _ in range(first_step, last_step):
                step, result = ready.get()
                if isinstance(result, BaseException):
                    raise result
                yield step, result
        finally:
            stop.set()
            thread.join()
