"""Phase 2 of a build: what stays, decided in the order of the parts and in nothing else's.

A document goes when an equal one came before it (unless its source draws from a distribution), when
it shares a passage with an evaluation set, or when the budget was reached before it. Decisions are
final: more parts may follow, and what was decided about earlier ones does not change. That is what
lets shards be written in waves while the rest is still being encoded.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foundling.data.board import Reached
from foundling.data.dedup import Duplicates
from foundling.data.spool import Part, PartInfo, read_part


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


class Decider:
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
        self.val_tokens = 0
        self.result: Counter[str] = Counter(rows=0, quarantined=0)
        """Counts for the manifest."""
        self.by_source: dict[int, Counter[str]] = {}
        """What stays of each source, by its number."""

    @property
    def full(self) -> bool:
        """Whether the budget is reached."""
        return self._max_tokens is not None and self.train_tokens >= self._max_tokens

    def take(self, parts: Sequence[Reached]) -> None:
        """Decide about the next parts."""
        if self._duplicates is not None:
            for part in parts:
                self._duplicates.add(read_part(part.info.path).hashes, part.draws)
            self._duplicates.settle()
        for part in parts:
            self.taken += 1
            if not self.full:
                self._decide(part.info, part.source)

    def keep(self, decided: Decided, part: Part) -> NDArray[np.bool_]:
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
        self.val_tokens += decided.val_tokens
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
        self, part: Part, stay: NDArray[np.bool_], lengths: NDArray[np.int64]
    ) -> tuple[int, int]:
        """Documents and rows up to the one that reaches the budget, that one included."""
        if self._max_tokens is None:
            return len(lengths), part.rows
        counted = np.where(stay & ~part.held_out, lengths, 0)
        end = int(np.cumsum(counted).searchsorted(self._max_tokens - self.train_tokens))
        if end >= len(lengths):
            return len(lengths), part.rows
        return end + 1, int(part.row[end]) + 1
