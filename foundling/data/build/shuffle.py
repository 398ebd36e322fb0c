"""Documents into a random order on disk, with memory for a few million tokens.

Where a document goes is computed (a keyed bijection of its number), so nothing has to be held or
sorted as a whole: documents are dealt into boxes, files that each take a run of consecutive places,
and a box that fits into memory is put in order there. A box that does not is dealt again. Every
token is read and written once for each level of boxes: one below some 2 billion tokens, two below
500 billion.

Rejected: gathering each shard from all the parts (every part would be read once for every shard,
and its mapped pages would pile up).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from foundling.data.shard import Shard

IN_MEMORY = 32_000_000
"""Tokens that are put in order in memory."""
FAN = 256
"""Boxes at a time, which is also how many files are open."""
_SHORT = 192
"""Documents shorter than this on average are gathered by index, longer ones one by one."""
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Placed:
    """Documents, and the place of each in the order to come."""

    place: NDArray[np.int64]
    documents: Shard
    """Its columns are of these documents; its tokens may hold others besides."""
    starts: NDArray[np.int64]
    """Where each document begins in the tokens."""
    stops: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        """Of these documents."""
        return int((self.stops - self.starts).sum())


def chosen(shard: Shard, which: NDArray[np.int64], place: NDArray[np.int64]) -> Placed:
    """Some documents of a shard; nothing of their tokens is copied."""
    columns = replace(
        shard,
        text_bytes=shard.text_bytes[which],
        kind_codes=shard.kind_codes[which],
        floor_bits=shard.floor_bits[which],
    )
    return Placed(place, columns, shard.offsets[which], shard.offsets[which + 1])


def in_order(
    placed: Iterable[Placed], first: int, last: int, tokens: int, box: Path, in_memory: int
) -> Iterator[Shard]:
    """Documents by place, `first` to `last` (not included), a memory's worth at a time.

    `tokens` is how many they have in all; boxes are files whose names begin with `box`.
    """
    if tokens <= in_memory or last - first <= 1:
        lots = list(placed)
        if lots:
            place = np.concatenate([lot.place for lot in lots])
            rank = np.empty(len(place), np.int64)
            rank[np.argsort(place)] = np.arange(len(place))
            yield _arranged(lots, rank)
        return
    ways = min(FAN, last - first, math.ceil(2 * tokens / in_memory))
    edges = [first + (last - first) * way // ways for way in range(ways + 1)]
    amounts = _deal(placed, edges, box, in_memory)
    for number, (start, stop) in enumerate(pairwise(edges)):
        path = _box(box, number)
        if amounts[number]:
            yield from in_order(_read(path), start, stop, amounts[number], path, in_memory)
        path.unlink()


def _arranged(lots: Sequence[Placed], rank: NDArray[np.int64]) -> Shard:
    """Lots as one shard, each document at its rank."""
    shards = [lot.documents for lot in lots]
    lengths = np.empty(len(rank), np.int64)
    lengths[rank] = np.concatenate([lot.stops - lot.starts for lot in lots])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.empty(int(offsets[-1]), shards[0].tokens.dtype)
    mask = None if shards[0].mask is None else np.empty(len(tokens), np.uint8)
    done = 0
    for lot in lots:
        into = offsets[rank[done : done + len(lot.place)]]
        done += len(lot.place)
        _copy(lot.documents.tokens, lot.starts, lot.stops, tokens, into)
        if mask is not None and lot.documents.mask is not None:
            _copy(lot.documents.mask, lot.starts, lot.stops, mask, into)
    return Shard(
        offsets=offsets,
        tokens=tokens,
        mask=mask,
        text_bytes=_ranked([shard.text_bytes for shard in shards], rank),
        kind_codes=_ranked([shard.kind_codes for shard in shards], rank),
        kind_names=shards[0].kind_names,
        floor_bits=_ranked([shard.floor_bits for shard in shards], rank),
    )


def _ranked(columns: list[NDArray[Any]], rank: NDArray[np.int64]) -> NDArray[Any]:
    joined = np.concatenate(columns)
    result = np.empty_like(joined)
    result[rank] = joined
    return result


def _copy(
    flat: NDArray[Any],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    out: NDArray[Any],
    into: NDArray[np.int64],
) -> None:
    """Copy each run flat[start:stop] to out[into:]."""
    lengths = stops - starts
    if int(lengths.sum()) >= _SHORT * len(starts):
        runs = zip(starts.tolist(), stops.tolist(), into.tolist(), strict=True)
        for start, stop, at in runs:
            out[at : at + stop - start] = flat[start:stop]
        return
    # Short documents: two indices a token, in blocks, because an index is four times a token.
    ends = np.cumsum(lengths)
    edge = 0
    while edge < len(starts):
        begun = int(ends[edge - 1]) if edge else 0
        stop = max(edge + 1, int(ends.searchsorted(begun + _BLOCK, side="right")))
        some = lengths[edge:stop]
        within = np.arange(int(some.sum())) - np.repeat(np.cumsum(some) - some, some)
        out[np.repeat(into[edge:stop], some) + within] = flat[
            np.repeat(starts[edge:stop], some) + within
        ]
        edge = stop


def _deal(placed: Iterable[Placed], edges: list[int], box: Path, in_memory: int) -> list[int]:
    """Put every document into the box of its place; the tokens in each box."""
    ways = len(edges) - 1
    amounts = [0] * ways
    with ExitStack() as stack:
        files = [stack.enter_context(open(_box(box, way), "wb")) for way in range(ways)]
        for lots in _lots(placed, in_memory // 2):
            place = np.concatenate([lot.place for lot in lots])
            way_of = np.searchsorted(np.asarray(edges[1:-1]), place, side="right")
            order = np.argsort(way_of, kind="stable")
            rank = np.empty(len(order), np.int64)
            rank[order] = np.arange(len(order))
            shard, places = _arranged(lots, rank), place[order]
            ends = np.cumsum(np.bincount(way_of, minlength=ways)).tolist()
            for way, (start, stop) in enumerate(pairwise([0, *ends])):
                if stop > start:
                    amounts[way] += _append(files[way], shard, places, start, stop)
    return amounts


def _lots(placed: Iterable[Placed], tokens: int) -> Iterator[list[Placed]]:
    """Several parts at once, so that a box gets long runs and not a few documents at a time."""
    waiting: list[Placed] = []
    amount = 0
    for lot in placed:
        waiting.append(lot)
        amount += lot.tokens
        if amount >= tokens:
            yield waiting
            waiting, amount = [], 0
    if waiting:
        yield waiting


# A box is written and read by one process within one run of a build and never by another, so its
# layout is private to this file: the sizes, then the columns.


def _box(box: Path, number: int) -> Path:
    return box.with_name(f"{box.name}-{number:03d}")


def _append(file: BinaryIO, shard: Shard, place: NDArray[np.int64], start: int, stop: int) -> int:
    """Append documents `start` to `stop`; their tokens."""
    low, high = int(shard.offsets[start]), int(shard.offsets[stop])
    sizes = np.array([stop - start, high - low, shard.mask is not None, shard.tokens.itemsize])
    columns: list[NDArray[Any]] = [
        sizes.astype(np.int64),
        place[start:stop],
        np.diff(shard.offsets[start : stop + 1]),
        shard.text_bytes[start:stop],
        shard.kind_codes[start:stop],
        shard.floor_bits[start:stop],
        shard.tokens[low:high],
    ]
    if shard.mask is not None:
        columns.append(shard.mask[low:high])
    for column in columns:
        file.write(np.ascontiguousarray(column).data)
    return high - low


def _read(path: Path) -> Iterator[Placed]:
    """What was put into a box, as it was put in."""
    with open(path, "rb") as file:
        while True:
            sizes = np.fromfile(file, np.int64, 4)
            if not len(sizes):
                return
            size, tokens, masked, width = sizes.tolist()
            place = np.fromfile(file, np.int64, size)
            lengths = np.fromfile(file, np.int64, size)
            text_bytes = np.fromfile(file, np.int64, size)
            codes = np.fromfile(file, np.int32, size)
            floors = np.fromfile(file, np.float64, size)
            dtype: type[Any] = np.uint16 if width == 2 else np.uint32
            documents = Shard(
                offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
                tokens=np.fromfile(file, dtype, tokens),
                mask=np.fromfile(file, np.uint8, tokens) if masked else None,
                text_bytes=text_bytes,
                kind_codes=codes,
                kind_names=(),
                floor_bits=floors,
            )
            yield Placed(place, documents, documents.offsets[:-1], documents.offsets[1:])
