"""Where a wave ends, what is said of bad rows, and when a build has seen too many of them."""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from foundling.config.errors import DataError
from foundling.data.board import Reached
from foundling.data.decide import Decided
from foundling.data.rows import broken_off
from foundling.data.spool import PartInfo, read_part

MOST_SHARDS = 16
"""Shards of a wave at most."""
FIRST_ROWS = 1000
"""Rows before a share means anything."""


def wave_end(wave: int, shard_tokens: int) -> int:
    """Tokens for training at which a wave (0, 1, ...) ends.

    The first is one shard, so that training starts early; each further one is as large as all
    before it, up to 16 shards, because documents are shuffled within their wave.
    """
    end = 1
    for _ in range(wave):
        end += min(end, MOST_SHARDS)
    return end * shard_tokens


class BadRows:
    """Stops a build whose source is not what its owner thinks it is.

    Counted in the order of the parts and only where the budget certainly reaches, so that a build
    stops or does not stop whatever the number of workers.
    """

    def __init__(self, most: float, max_tokens: int | None, allow_broken_files: bool) -> None:
        self.most = most
        self._allow_broken_files = allow_broken_files
        self._max_tokens = max_tokens
        self._seen = 0
        self._rows = 0
        self._bad = 0
        self._tokens = 0

    def check(self, reached: Sequence[Reached]) -> None:
        """Look at the parts that are new."""
        for part in reached[self._seen :]:
            if self._max_tokens is not None and self._tokens >= self._max_tokens:
                return
            self._seen += 1
            _refuse_unknown(part.info)
            self._rows += part.info.rows + part.info.lost
            self._bad += part.info.bad + part.info.lost
            self._tokens += part.info.train_tokens
            if self._max_tokens is None or self._tokens < self._max_tokens:
                self._refuse_broken(part.info, part.info.rows)
            if self._rows >= FIRST_ROWS:
                self._judge(self._rows, self._bad, [p.info for p in reached[: self._seen]])

    def check_all(self, result: Mapping[str, int], parts: Sequence[Decided]) -> None:
        """Judge a build that has come to its end."""
        for part in parts:
            self._refuse_broken(part.info, part.rows)
        lost = result.get("lost", 0)
        bad = result["quarantined"] + lost
        self._judge(result["rows"] + lost, bad, [part.info for part in parts])

    def _refuse_broken(self, part: PartInfo, rows: int) -> None:
        """Refuse a file that breaks off in the first `rows` of a part: most of it may be lost."""
        if self._allow_broken_files or not part.broken:
            return
        for entry in read_part(part.path).quarantine:
            if "lost" in entry and entry["row"] < rows:
                raise DataError(broken_off(entry["where"], entry["reason"]))

    def _judge(self, rows: int, bad: int, parts: Sequence[PartInfo]) -> None:
        if bad <= self.most * rows:
            return
        raise DataError(
            f"{bad:,} of {rows:,} rows cannot be used ({bad / rows:.1%}; more than"
            f" {self.most:.1%}), {reason_of(parts)}; look at the source, or allow more with"
            " --max-bad."
        )


def _refuse_unknown(part: PartInfo) -> None:
    """Refuse a tokenizer that has no tokens for this text: a model would learn nothing from it."""
    inside = part.tokens - 2 * part.documents  # without BOS and EOS
    if part.unknown > inside / 2:
        raise DataError(
            f"the tokenizer has no token for most of the text: {part.unknown:,} of {inside:,}"
            " tokens are its unknown token; give a tokenizer that was made for such text."
        )


def write_quarantine(path: Path, parts: Sequence[Decided]) -> None:
    """A line for every unusable row, with its number among all; flushed to disk."""
    with open(path, "w", encoding="utf-8") as file:
        for part in parts:
            for entry in read_part(part.info.path).quarantine if part.info.bad else ():
                if entry["row"] < part.rows:
                    number = part.first_row + entry["row"]
                    file.write(json.dumps({**entry, "row": number}) + "\n")
        file.flush()
        os.fsync(file.fileno())


def reason_of(parts: Sequence[PartInfo]) -> str:
    """Why rows were bad, at the end of a sentence: what the last part with any says most often."""
    last = next(part for part in reversed(parts) if part.bad)
    entries = read_part(last.path).quarantine
    reason, _ = Counter(entry["reason"] for entry in entries).most_common(1)[0]
    where = next(entry["where"] for entry in entries if entry["reason"] == reason)
    return f"most lately because of {reason!r} at {where or 'no known place'}"
