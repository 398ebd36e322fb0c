"""A built data set on disk: checked when it is opened, mapped when it is read.

Opening compares sizes, which is cheap and catches missing and truncated files; `verify` reads and
hashes everything. Shards are mapped when first needed and at most MAX_OPEN at a time.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from foundling.config.errors import DataError
from foundling.config.manifest import Manifest, ShardInfo, note_packed_rows
from foundling.config.sections import Packing
from foundling.data.batch import Batch, Canvas, Counts
from foundling.data.packing import ConcatPlan, Plan
from foundling.data.paint import paint
from foundling.data.plancache import plan_for
from foundling.data.shard import Shard, Tokens, read_shard
from foundling.runtime.files import sha256_file

MAX_OPEN = 256
TOKENIZER_FOLDER = "tokenizer"

Split = Literal["train", "val"]


class DataSet:
    """One split of a data set."""

    def __init__(
        self, folder: str | Path, *, tokenizer: str | None = None, split: Split = "train"
    ) -> None:
        """Open and check sizes; `tokenizer` is the fingerprint that the tokens must have."""
        self.folder = Path(folder)
        self.manifest = Manifest.load(self.folder)
        self.split: Split = split
        if tokenizer is not None and tokenizer != self.manifest.tokenizer:
            raise DataError(
                f"{self.folder} was built with tokenizer {self.manifest.tokenizer[:12]} and"
                f" {tokenizer[:12]} is asked for; build it again or use"
                f" {self.folder / TOKENIZER_FOLDER}."
            )
        for info in (*self.manifest.train, *self.manifest.val):
            _check_size(self.folder / info.name, info)
        self.shards = self.manifest.train if split == "train" else self.manifest.val
        self.digest = self.manifest.digest
        self._packed: dict[tuple[int, Packing], Packed] = {}
        self.shard = lru_cache(maxsize=MAX_OPEN)(self._open)

    def _open(self, number: int) -> Shard:
        info = self.shards[number]
        shard = read_shard(self.folder / info.name)
        if len(shard) != info.documents or len(shard.tokens) != info.tokens:
            raise DataError(
                f"{self.folder / info.name} holds {len(shard)} documents of {len(shard.tokens)}"
                f" tokens where the manifest says {info.documents} of {info.tokens}; build the"
                " data set again."
            )
        return shard

    def verify(self) -> None:
        """Hash every shard of both splits and compare with the manifest."""
        for info in (*self.manifest.train, *self.manifest.val):
            path = self.folder / info.name
            _check_size(path, info)
            if sha256_file(path) != info.sha256:
                raise DataError(
                    f"{path} is damaged (its sha256 is not the manifest's); build the data set"
                    " again."
                )

    def packed(self, seq_len: int, packing: Packing) -> "Packed":
        """The rows of this split under one sequence length and policy."""
        key = (seq_len, packing)
        if key not in self._packed:
            self._packed[key] = Packed(self, seq_len, packing)
        return self._packed[key]

    def units(self, seq_len: int, packing: Packing) -> int:
        """Rows in one epoch."""
        return self.packed(seq_len, packing).units

    def row(self, unit: int, seq_len: int, packing: Packing) -> Batch:
        """One row as a batch of one, for looking at."""
        canvas = Canvas.blank(1, seq_len)
        units, at = np.array([unit], np.int64), np.zeros(1, np.int64)
        self.packed(seq_len, packing).paint(canvas, at, units)
        return finish(canvas, {self.manifest.name: at})


class Packed:
    """Rows of a data set, numbered through all of its shards."""

    def __init__(self, data: DataSet, seq_len: int, packing: Packing) -> None:
        self.data, self.seq_len, self.packing = data, seq_len, packing
        self._plan = lru_cache(maxsize=MAX_OPEN)(self._plan_of)
        rows = [self._rows(number, info) for number, info in enumerate(data.shards)]
        self._firsts = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        self.units = int(self._firsts[-1])
        if packing != "concat" and data.split == "train":
            with suppress(OSError):  # a read-only folder costs `plan` its exactness, nothing else
                note_packed_rows(data.folder, data.digest, packing, seq_len, self.units)

    def _rows(self, number: int, info: ShardInfo) -> int:
        # concat needs no file: thousands of shards are counted from the manifest alone.
        if self.packing == "concat":
            return ConcatPlan(info.tokens, self.seq_len).rows
        return self._plan(number).rows

    def _plan_of(self, number: int) -> Plan:
        info = self.data.shards[number]
        path = self.data.folder / info.name
        return plan_for(self.data.shard(number), path, info.sha256, self.seq_len, self.packing)

    def paint(self, canvas: Canvas, at: NDArray[np.int64], units: NDArray[np.int64]) -> None:
        """Paint units onto the canvas rows `at`, a shard at a time."""
        shards = self._firsts.searchsorted(units, side="right") - 1
        for number in np.unique(shards).tolist():
            here = np.flatnonzero(shards == number)
            shard, plan = self.data.shard(number), self._plan(number)
            paint(canvas, at[here], shard, plan, units[here] - self._firsts[number])


def finish(canvas: Canvas, rows_of: dict[str, NDArray[np.int64]]) -> Batch:
    """Count what was painted, by source (each with its rows of the canvas) and in all."""
    seq_len = canvas.inputs.shape[1]
    tokens = np.count_nonzero(canvas.documents >= 0, axis=1)
    targets = np.count_nonzero(canvas.targets >= 0, axis=1)
    by_source = {
        name: Counts(len(rows) * seq_len, int(tokens[rows].sum()), int(targets[rows].sum()))
        for name, rows in rows_of.items()
    }
    return Batch(
        inputs=canvas.inputs,
        targets=canvas.targets,
        documents=canvas.documents,
        counts=Counts(canvas.inputs.size, int(tokens.sum()), int(targets.sum())),
        by_source=by_source,
        units={name: len(rows) for name, rows in rows_of.items()},
    )


@dataclass(frozen=True)
class HeldOutDoc:
    """A document that no training row holds."""

    tokens: Tokens
    mask: NDArray[np.uint8] | None
    """Chats only: 1 on what the assistant must produce."""
    text_bytes: int
    kind: str
    floor_bits: float | None


def held_out(dataset: DataSet, max_tokens: int = 0) -> Iterator[HeldOutDoc]:
    """Documents of the val split in stored order, until `max_tokens` are reached (0: all).

    It reads val whatever split is given, so that nobody measures on training data by mistake.
    """
    data = dataset if dataset.split == "val" else DataSet(dataset.folder, split="val")
    seen = 0
    for number in range(len(data.shards)):
        shard = data.shard(number)
        for index in range(len(shard)):
            if max_tokens and seen >= max_tokens:
                return
            start, stop = int(shard.offsets[index]), int(shard.offsets[index + 1])
            seen += stop - start
            floor = float(shard.floor_bits[index])
            yield HeldOutDoc(
                tokens=shard.tokens[start:stop],
                mask=None if shard.mask is None else shard.mask[start:stop],
                text_bytes=int(shard.text_bytes[index]),
                kind=shard.kind_names[shard.kind_codes[index]],
                floor_bits=None if np.isnan(floor) else floor,
            )


def _check_size(path: Path, info: ShardInfo) -> None:
    if not path.is_file():
        raise DataError(f"{path} is missing; copy it back or build the data set again.")
    size = path.stat().st_size
    if size != info.file_bytes:
        raise DataError(
            f"{path} has {size} bytes where the manifest says {info.file_bytes}; copy it again or"
            " build the data set again."
        )
