"""A built data set on disk: checked when it is opened, mapped when it is read.

Opening compares sizes, which is cheap and catches missing and truncated files; `verify` reads and
hashes everything. Shards are mapped when first needed, at most MAX_OPEN at a time in a process,
whatever the number of data sets.
"""

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from foundling.config.data import packing_spec_of
from foundling.config.data_manifest import Manifest, ShardInfo, shard_problem
from foundling.config.errors import DataError
from foundling.config.packing_spec import (
    PackedSize,
    Packing,
    PackingSpec,
    concat_size,
    read_size_cache,
    shard_key,
    total_size,
    write_size_cache,
)
from foundling.data.batch import Batch, BatchBuffer, Counts, collate_into
from foundling.data.packing import Plan, StreamPlan, is_stream, plan_for
from foundling.data.segments import Span
from foundling.data.shard import Shard, Tokens, damage, own_tokenizer, read_shard
from foundling.runtime.console import say
from foundling.tokenizer.tokenizer import Tokenizer

Thing = TypeVar("Thing")


class Pool(Generic[Thing]):
    """Keeps the `limit` things that were asked for last.

    Rejected: lru_cache, whose key would be the whole description of a shard, hashed anew for every
    row that is read.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: OrderedDict[Hashable, Thing] = OrderedDict()
        self._lock = threading.Lock()  # a loader's thread and the loop may ask at once

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable, make: Callable[[], Thing]) -> Thing:
        """The thing of that key, made if it is not there."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        made = make()
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > self.limit:
                self._kept.popitem(last=False)
        return made

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._kept.clear()


MAX_OPEN = 256
SHARDS: Pool[Shard] = Pool(MAX_OPEN)
PLANS: Pool[Plan] = Pool(MAX_OPEN)
TOKENIZER_FOLDER = "tokenizer"
SAY_AFTER_S = 10.0
"""Packing a large data set for the first time takes minutes: report progress, and cache sizes."""

Split = Literal["train", "val"]


class DataSet:
    """One split of a data set."""

    def __init__(
        self,
        folder: str | Path,
        *,
        tokenizer: str | None = None,
        split: Split = "train",
        follow: bool = False,
    ) -> None:
        """Open and check sizes; `tokenizer` is the fingerprint that the tokens must have, and
        `follow` takes a data set whose build is still going on."""
        self.folder = Path(folder)
        self.split: Split = split
        self.follow = follow
        self._tokenizer = tokenizer
        self._where = str(self.folder)
        self._load()

    def _load(self) -> None:
        manifest = Manifest.load(self.folder)
        if self._tokenizer not in (None, manifest.tokenizer):
            raise DataError(
                f"{self.folder} was built with tokenizer {manifest.tokenizer[:12]} and"
                f" {self._tokenizer[:12]} is asked for; build it again or use"
                f" {self.folder / TOKENIZER_FOLDER}."
            )
        self.is_complete = manifest.complete
        """False while a build is still adding shards."""
        if not (self.is_complete or self.follow):
            raise DataError(
                f"{self.folder} is still being built; wait for its build, or set data.follow to"
                " read on as it grows."
            )
        for info in (*manifest.train, *manifest.val):
            _check_size(self.folder, info)
        self.manifest = manifest
        self.shards = manifest.train if self.split == "train" else manifest.val
        self.digest = manifest.digest
        self._packed: dict[PackingSpec, PackedDataset] = {}

    def refresh(self) -> bool:
        """Look whether a followed data set has grown; what was there must still be there."""
        if self.is_complete:
            return False
        before, was = self.shards, self.is_complete
        self._load()
        if self.shards[: len(before)] != before:
            raise DataError(
                f"{self.folder} was built anew while it was followed; bring the old one back or"
                " start a new run."
            )
        return self.is_complete != was or len(self.shards) != len(before)

    def digest_of(self, span: Span | None) -> str:
        """Identity of some shards, which stays when others come; None means all, for good."""
        if span is None:
            return self.digest
        sums = "\n".join(info.sha256 for info in self.shards[slice(*span)])
        return hashlib.sha256(f"shards {span[0]} to {span[1]}\n{sums}".encode()).hexdigest()

    @property
    def stored(self) -> PackedSize:
        """Tokens and documents, before any packing."""
        return PackedSize(
            tokens=sum(info.tokens for info in self.shards),
            documents=sum(info.documents for info in self.shards),
        )

    def shard(self, number: int) -> Shard:
        """One shard, mapped."""
        info = self.shards[number]
        return SHARDS.get((self._where, info.sha256), lambda: open_shard(self.folder, info))

    def verify(self, *, changed_only: bool = False) -> None:
        """Hash every shard of both splits and compare with the manifest; with `changed_only`,
        those that were changed since they were last found whole."""
        path = self.folder / TOKENIZER_FOLDER

        def own() -> Tokenizer | None:
            return own_tokenizer(path, self.manifest) if path.exists() else None

        wrong = damage(self.folder, self.manifest, own, changed_only=changed_only)
        if wrong:
            more = f" ({len(wrong) - 1} more are not whole either)" if len(wrong) > 1 else ""
            raise DataError(wrong[0].removesuffix(".") + more + ".")

    def packed(self, spec: PackingSpec) -> "PackedDataset":
        """The units of this split in one packing."""
        if spec not in self._packed:
            self._packed[spec] = PackedDataset(self, spec)
        return self._packed[spec]

    def size(self, spec: PackingSpec, span: Span | None = None) -> PackedSize:
        """One epoch in one packing, of some shards or of all: units, padding, cut documents."""
        return self.packed(spec).size(span)

    def units(self, seq_len: int, packing: Packing) -> int:
        """Units in one epoch."""
        return self.size(packing_spec_of(seq_len, packing)).units

    def row(self, unit: int, seq_len: int, packing: Packing) -> Batch:
        """One unit as a batch, for looking at."""
        return self.unit(unit, packing_spec_of(seq_len, packing))

    def unit(self, unit: int, spec: PackingSpec) -> Batch:
        """One unit as a batch: a row, or a bucket's micro-batch."""
        packed = self.packed(spec)
        buffer = BatchBuffer(*packed.shape(unit))
        counts = packed.collate_into(buffer, np.zeros(1, np.int64), np.array([unit], np.int64))
        return buffer.finished({self.manifest.name: counts}, {self.manifest.name: 1})


class PackedDataset:
    """Units of a data set, numbered through all of its shards."""

    def __init__(self, data: DataSet, spec: PackingSpec) -> None:
        self.data, self.packing_spec = data, spec
        self._where = f"{data.folder} {spec.label}"
        self._is_stream = is_stream(spec)
        self._sizes = self._count()
        rows = [size.units for size in self._sizes]
        self._firsts = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        self.units = int(self._firsts[-1])

    def size(self, span: Span | None = None) -> PackedSize:
        """One epoch of some shards, or of all."""
        return total_size(self._sizes if span is None else self._sizes[slice(*span)])

    def _count(self) -> list[PackedSize]:
        """The size of each shard: by arithmetic, from the cache file, or by packing it."""
        infos = self.data.shards
        if self._is_stream:
            return [concat_size(info, self.packing_spec.seq_len) for info in infos]
        cache = read_size_cache(self.data.folder, self.packing_spec)
        missing = [number for number, info in enumerate(infos) if shard_key(info) not in cache]
        last = time.monotonic()
        for done, number in enumerate(missing):
            plan = self.plan(number)
            assert not isinstance(plan, StreamPlan)
            cache[shard_key(infos[number])] = plan.size
            if time.monotonic() > last + SAY_AFTER_S:
                last = time.monotonic()
                self._write_cache(cache)
                say(f"packing {self.data.folder}: {done + 1} of {len(missing)} shards")
        if missing:
            self._write_cache(cache)
        return [cache[shard_key(info)] for info in infos]

    def _write_cache(self, cache: dict[str, PackedSize]) -> None:
        with suppress(OSError):  # a read-only folder costs time, and `plan` its exactness
            write_size_cache(self.data.folder, self.packing_spec, cache)

    def plan(self, number: int) -> Plan:
        """The units of one shard."""
        info = self.data.shards[number]
        if self._is_stream:
            return StreamPlan(info.tokens, self.packing_spec.seq_len)
        return PLANS.get((self._where, info.sha256), lambda: self._make_plan(number, info))

    def _make_plan(self, number: int, info: ShardInfo) -> Plan:
        shard, path = self.data.shard(number), self.data.folder / info.name
        return plan_for(shard, path, info.sha256, self.packing_spec)

    def shape(self, unit: int) -> tuple[int, int]:
        """Rows and positions of a row of one unit."""
        number = int(self._firsts.searchsorted(unit, side="right")) - 1
        return self.plan(number).shape(unit - int(self._firsts[number]))

    def collate_into(
        self, buffer: BatchBuffer, at: NDArray[np.int64], units: NDArray[np.int64]
    ) -> Counts:
        """Copy units into the buffer's rows `at`, a shard at a time, and count what they hold."""
        shards = self._firsts.searchsorted(units, side="right") - 1
        places: dict[int, list[int]] = {}
        for place, number in enumerate(shards.tolist()):
            places.setdefault(number, []).append(place)
        total = Counts()
        for number, here in places.items():
            shard, plan = self.data.shard(number), self.plan(number)
            if plan.units != self._sizes[number].units:
                raise DataError(
                    f"the file rows-{self.packing_spec.label}.json in {self.data.folder} does not"
                    " fit its shards; delete it."
                )
            total += collate_into(buffer, at[here], shard, plan, units[here] - self._firsts[number])
        return total


def open_shard(folder: Path, info: ShardInfo) -> Shard:
    """Map a shard that is of the size, and holds the documents, that the manifest says."""
    _check_size(folder, info)
    path = folder / info.name
    shard = read_shard(path)
    if len(shard) != info.documents or len(shard.tokens) != info.tokens:
        raise DataError(
            f"{path} holds {len(shard)} documents of {len(shard.tokens)} tokens where the manifest"
            f" says {info.documents} of {info.tokens}; build the data set again."
        )
    return shard


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

    It reads val whatever split is given, so that no score is of training data by mistake.
    """
    data = dataset
    if dataset.split != "val":
        data = DataSet(dataset.folder, split="val", follow=dataset.follow)
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


def _check_size(folder: Path, info: ShardInfo) -> None:
    problem = shard_problem(folder, info)
    if problem:
        raise DataError(problem)
