"""How fast the loader is: tokens a second of one thread, and how long a seek takes.

Tests hold the loader to these figures. Both clocks are given: the wall's is what a run sees, the
thread's own is what a busy machine does not change.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from foundling.config.data import DataConfig
from foundling.data.batch import Counts
from foundling.data.batch_reader import BatchReader
from foundling.data.dataset import DataSet
from foundling.data.order import reopen_order


@dataclass(frozen=True)
class LoadRate:
    """What one thread loaded, and how long it took."""

    counts: Counts
    wall_s: float
    thread_s: float

    @property
    def tokens_per_s(self) -> float:
        """Real tokens a second of the wall clock."""
        return self.counts.tokens / self.wall_s

    @property
    def tokens_per_thread_s(self) -> float:
        """Real tokens a second of the thread's own time."""
        return self.counts.tokens / self.thread_s


def load_rate(
    sources: Mapping[str, DataSet],
    data: DataConfig,
    *,
    seq_len: int = 2048,
    rows: int = 16,
    seconds: float = 1.0,
    seed: int = 1,
) -> LoadRate:
    """Load steps of one micro-batch for about `seconds`, after one to warm up; the numbers of the
    documents are worked out for every batch."""
    order = reopen_order(
        (), sources, data, seed=seed, seq_len=seq_len, steps=1, global_batch_tokens=rows * seq_len
    )
    loader = BatchReader(sources, order, micro_tokens=rows * seq_len)
    loader.step(0)
    counts, step = Counts(), 0
    wall, thread = time.perf_counter(), time.thread_time()
    while time.perf_counter() < wall + seconds:
        step += 1
        for batch in loader.step(step):
            counts += batch.counts
            _ = batch.documents
    return LoadRate(counts, time.perf_counter() - wall, time.thread_time() - thread)


def seek_s(loader: BatchReader, step: int) -> float:
    """Seconds to a step's first batch, wherever the step is."""
    began = time.perf_counter()
    loader.step(step)
    return time.perf_counter() - began
