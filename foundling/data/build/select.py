"""Phase 2 of a build: what stays, decided in the order of the parts and in nothing else's.

A document goes when an equal one came before it (unless its source draws from a distribution), when
it shares a passage with an evaluation set, or when the budget was reached before it. Decisions are
final: more parts may follow, and what was decided about earlier ones does not change. That is what
lets shards be written in waves while the rest is still being encoded.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foundling.data.build.part_files import Hashes, PartFile, PartInfo, read_part
from foundling.data.build.scheduler import PlacedPart

# Exact duplicates among any number of documents, with the memory of a few.
#
# Each document is a 128-bit hash and a number; of equal hashes the lowest number stays. Hashes are
# spread over bucket files by their first byte, and equal ones meet in one bucket, so a bucket is
# all that has to be in memory at once, with one bit a document. Rejected: a set of all hashes (a
# hundred bytes a document in Python) and a Bloom filter (it drops documents that are no
# duplicates).

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


@dataclass(frozen=True, kw_only=True)
class Decided:
    """A part and what stays of it."""

    info: PartInfo
    first: int
    """Number of its first document among all."""
    documents: int
    """How many of its documents come before the end of the budget."""
    rows: int
    """Likewise of its rows."""
    first_row: int
    """Number of its first row among all."""
    train: int
    """Documents that stay for training."""
    val: int
    train_tokens: int
    val_tokens: int
    kinds: tuple[str, ...]


class Selection:
    """Takes parts in order and says what stays."""

    def __init__(self, duplicates: Duplicates | None, max_tokens: int | None) -> None:
        """`duplicates` None keeps them; the budget counts what stays for training."""
        self._duplicates = duplicates
        self._max_tokens = max_tokens
        self.parts: list[Decided] = []
        self.taken = 0
        """Parts looked at, those beyond the budget included."""
        self.documents = 0
        self.rows = 0
        self.train = 0
        self.val = 0
        self.train_tokens = 0
        self.result: Counter[str] = Counter(rows=0, quarantined=0)
        """Counts for the manifest."""
        self.by_source: dict[int, Counter[str]] = {}
        """What stays of each source, by its number."""

    @property
    def full(self) -> bool:
        """Whether the budget is reached."""
        return self._max_tokens is not None and self.train_tokens >= self._max_tokens

    def take(self, parts: Sequence[PlacedPart]) -> None:
        """Decide about the next parts."""
        if self._duplicates is not None:
            for part in parts:
                self._duplicates.add(read_part(part.info.path).hashes, part.draws)
            self._duplicates.settle()
        for part in parts:
            self.taken += 1
            if not self.full:
                self._decide(part.info, part.source)

    def keep(self, decided: Decided, part: PartFile) -> NDArray[np.bool_]:
        """Which documents of a part stay."""
        stay = ~(self._further(decided.first, len(part.documents)) | part.overlaps)
        stay[decided.documents :] = False
        return stay

    def _further(self, first: int, count: int) -> NDArray[np.bool_]:
        if self._duplicates is None:
            return np.zeros(count, np.bool_)
        return self._duplicates.further(first, count)

    def _decide(self, info: PartInfo, source: int = 0) -> None:
        part = read_part(info.path)
        size = len(part.documents)
        further = self._further(self.documents, size)
        stay = ~(further | part.overlaps)
        lengths = np.diff(part.documents.offsets)
        seen, rows = self._cut(part, stay, lengths)
        stay[seen:] = False
        train, val = stay & ~part.held_out, stay & part.held_out
        codes = np.unique(part.documents.kind_codes[stay])
        decided = Decided(
            info=info,
            first=self.documents,
            documents=seen,
            rows=rows,
            first_row=self.rows,
            train=int(train.sum()),
            val=int(val.sum()),
            train_tokens=int(lengths[train].sum()),
            val_tokens=int(lengths[val].sum()),
            kinds=tuple(part.documents.kind_names[code] for code in codes.tolist()),
        )
        self.parts.append(decided)
        self.documents += size
        self.rows += rows
        self.train += decided.train
        self.val += decided.val
        self.by_source.setdefault(source, Counter()).update(
            train_documents=decided.train,
            train_tokens=decided.train_tokens,
            val_documents=decided.val,
            val_tokens=decided.val_tokens,
        )
        self.train_tokens += decided.train_tokens
        bad = [entry for entry in part.quarantine if entry["row"] < rows]
        lost = sum(entry.get("lost", 0) for entry in bad)
        gone = further[:seen]
        self.result.update(
            rows=rows,
            quarantined=len(bad),
            duplicates=int(gone.sum()),
            overlapping=int((part.overlaps[:seen] & ~gone).sum()),
            **({"lost": lost} if lost else {}),
            **(part.tally if rows == part.rows else {}),
        )

    def _cut(
        self, part: PartFile, stay: NDArray[np.bool_], lengths: NDArray[np.int64]
    ) -> tuple[int, int]:
        """Documents and rows up to the one that reaches the budget, that one included."""
        if self._max_tokens is None:
            return len(lengths), part.rows
        counted = np.where(stay & ~part.held_out, lengths, 0)
        end = int(np.cumsum(counted).searchsorted(self._max_tokens - self.train_tokens))
        if end >= len(lengths):
            return len(lengths), part.rows
        return end + 1, int(part.row[end]) + 1
