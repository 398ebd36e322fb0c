"""Steps to batches: a pure function of the step, and a thread that works ahead.

Global batch b is the units [b * G, (b + 1) * G) of the order, and a rank takes its slice. G need
not divide by anything: every rank returns the same number of micro-batches of the same shape, and
rows that are left over are fully masked. Rejected: worker processes (the work is copying, which
releases the interpreter's lock) and any state beyond the number of the step.
"""

import queue
import threading
from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np

from foundling.config.errors import DataError
from foundling.config.sections import Packing
from foundling.data.batch import Batch, Canvas
from foundling.data.dataset import DataSet, finish
from foundling.data.order import Located, Order, Segment

BLOCK = 4096
"""Samples located at a time: the shuffle's fixed cost is shared by many steps."""


def open_order(
    sources: Mapping[str, DataSet],
    weights: Mapping[str, float],
    *,
    seed: int,
    seq_len: int,
    packing: Packing,
) -> Order:
    """The order of a fresh run: one segment over these data sets."""
    return Order(seed, [segment_of(sources, weights, seq_len=seq_len, packing=packing)])


def segment_of(
    sources: Mapping[str, DataSet],
    weights: Mapping[str, float],
    *,
    seq_len: int,
    packing: Packing,
    first_sample: int = 0,
) -> Segment:
    """What is on disk now, as a segment that starts at `first_sample`."""
    return Segment(
        first_sample=first_sample,
        digests={name: sources[name].digest for name in weights},
        weights=dict(weights),
        units={name: sources[name].units(seq_len, packing) for name in weights},
        seq_len=seq_len,
        packing=packing,
    )


class Loader:
    """This rank's share of every step."""

    def __init__(
        self,
        sources: Mapping[str, DataSet],
        order: Order,
        *,
        seq_len: int,
        global_batch: int,
        micro_batch: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """`global_batch` is units per step over all ranks, `micro_batch` the most at a time."""
        if global_batch < 1 or micro_batch < 1 or not 0 <= rank < world:
            raise ValueError(f"no batch has {global_batch=} {micro_batch=} {rank=} {world=}")
        self.order, self.seq_len, self.global_batch = order, seq_len, global_batch
        largest = -(-global_batch // world)
        self.micro_steps = -(-largest // micro_batch)
        """Micro-batches a step, the same on every rank."""
        self.rows = -(-largest // self.micro_steps)
        """Rows of every micro-batch; at most `micro_batch`, and as even as can be."""
        whole, left = divmod(global_batch, world)
        self._first = rank * whole + min(rank, left)
        self._count = whole + (rank < left)
        self._sources = dict(sources)
        self._check(order.segments[-1])
        self._block = lru_cache(maxsize=4 + global_batch // BLOCK)(self._locate_block)

    def _check(self, segment: Segment) -> None:
        """Refuse data that is not what the order was made for."""
        if segment.seq_len != self.seq_len:
            raise DataError(
                f"the data order is cut for rows of {segment.seq_len} tokens and"
                f" {self.seq_len} are asked for; append a segment."
            )
        for name, digest in segment.digests.items():
            if name not in self._sources:
                raise DataError(f"the data order reads {name}, which is not opened; add it.")
            if self._sources[name].digest != digest:
                raise DataError(
                    f"{name} is not the data set the order was made for (digest"
                    f" {self._sources[name].digest[:12]}, expected {digest[:12]}); bring the old"
                    " one back or start a new run."
                )

    def step(self, step: int) -> list[Batch]:
        """This rank's micro-batches of optimizer step `step` (from 0)."""
        first = step * self.global_batch + self._first
        batches = []
        for number in range(self.micro_steps):
            start = number * self.rows
            count = max(0, min(self.rows, self._count - start))
            batches.append(self._batch(first + start, count))
        return batches

    def _batch(self, first: int, count: int) -> Batch:
        canvas = Canvas.blank(self.rows, self.seq_len)
        rows_of = {}
        if count:
            packing = self.order.segment_at(first).packing
            at = self._locate(first, count)
            for source in np.unique(at.sources).tolist():
                name = at.names[source]
                rows = np.flatnonzero(at.sources == source)
                packed = self._sources[name].packed(self.seq_len, packing)
                packed.paint(canvas, rows, at.units[rows])
                rows_of[name] = rows
        return finish(canvas, rows_of)

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
