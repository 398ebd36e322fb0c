"""Exact duplicates among any number of documents, with the memory of a few.

Each document is a 128-bit hash and a number; of equal hashes the lowest number stays. Hashes are
spread over bucket files by their first byte, and equal ones meet in one bucket, so a bucket is all
that has to be in memory at once, beside one bit a document. Rejected: a set of all hashes (a
hundred bytes a document in Python) and a Bloom filter (it drops documents that are no duplicates).
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foundling.data.spool import Hashes

BUCKETS = 256
IN_MEMORY = 1 << 20
"""Documents (24 bytes each) that wait in memory before they go to the buckets."""
_RECORD = 3
"""Words of a record: two of the hash, the document's number."""


class Duplicates:
    """Tell first copies from further ones, as documents come in."""

    def __init__(self, folder: Path, in_memory: int = IN_MEMORY) -> None:
        """Work in `folder`, which is emptied: what an earlier start left is added again."""
        self._folder = folder
        self._limit = in_memory
        self._waiting: list[NDArray[np.uint64]] = []
        self._waiting_count = 0
        self._bits: NDArray[np.uint8] = np.zeros(1 << 10, np.uint8)
        self.count = 0
        """Documents so far."""
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            path.unlink()

    def add(self, hashes: Hashes, draws: bool = False) -> None:
        """Number the next documents; those that are `draws` are never duplicates."""
        size = len(hashes)
        if not draws:
            record = np.empty((size, _RECORD), np.uint64)
            record[:, :2] = hashes
            record[:, 2] = np.arange(self.count, self.count + size, dtype=np.uint64)
            self._waiting.append(record)
            self._waiting_count += size
        self.count += size
        if self._waiting_count > self._limit:
            self._spill()

    def settle(self) -> None:
        """Find the further copies among everything that was added."""
        if self.count > 8 * len(self._bits):
            grown = np.zeros(max(2 * len(self._bits), -(-self.count // 8)), np.uint8)
            grown[: len(self._bits)] = self._bits
            self._bits = grown
        files = sorted(self._folder.iterdir())
        if not files:
            self._mark(np.concatenate([*self._waiting, np.empty((0, _RECORD), np.uint64)]))
            return
        self._spill()
        for path in sorted(self._folder.iterdir()):
            self._mark(np.fromfile(path, np.uint64).reshape(-1, _RECORD))

    def further(self, first: int, count: int) -> NDArray[np.bool_]:
        """Which of the documents `first` to `first + count` are further copies."""
        start, stop = first // 8, -(-(first + count) // 8)
        bits = np.unpackbits(self._bits[start:stop], bitorder="little")
        return bits[first - 8 * start :][:count].astype(np.bool_)

    def _spill(self) -> None:
        """Append what waits to the buckets."""
        records = np.concatenate([*self._waiting, np.empty((0, _RECORD), np.uint64)])
        self._waiting, self._waiting_count = [], 0
        bucket = (records[:, 0] >> np.uint64(56)).astype(np.int64)
        order = np.argsort(bucket, kind="stable")
        ends = np.cumsum(np.bincount(bucket, minlength=BUCKETS)).tolist()
        start = 0
        for number, end in enumerate(ends):
            if end > start:
                with open(self._folder / f"{number:03d}", "ab") as file:
                    records[order[start:end]].tofile(file)
            start = end

    def _mark(self, records: NDArray[np.uint64]) -> None:
        """Set the bit of every record whose hash came before; records are in order of number."""
        order = np.lexsort((records[:, 1], records[:, 0]))  # stable: lower numbers stay first
        sorted_ = records[order]
        same = (sorted_[1:, :2] == sorted_[:-1, :2]).all(axis=1)
        numbers = sorted_[1:, 2][same]
        bit = np.uint8(1) << (numbers & np.uint64(7)).astype(np.uint8)
        np.bitwise_or.at(self._bits, (numbers >> np.uint64(3)).astype(np.int64), bit)
