"""Attention of one step of the engine over the block cache: by gathering on a CPU, paged on CUDA.

The tokens of all requests lie end to end in one row. Both ways implement what the model asks of a
cache: they store the step's keys and values, then let every query see its own request.

Shapes: N tokens of the step, R requests, T and S the most queries and keys of a batch of requests,
H query heads, K key/value heads, D head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from foundling.generate.kv_cache import NOBODY, BlockManager, KVCache
from foundling.generate.scheduler import SequenceChunk
from foundling.plan.serving import BLOCK
from foundling.runtime.device import has_triton

Ints = NDArray[np.int64]
SINGLE, WHOLE, NEARLY_WHOLE, FAMILY = range(4)
"""Kinds of rows that attend alike: the next tokens of a request, whole texts, texts but for a short
beginning, and continuations of one prefix."""
FAMILY_SHARE = 3
"""A family has one own key at most for so many shared ones: each query skips those of the others,
which is cheap and not free."""
PADDING = 32
"""Queries of padding that a request may bring into a batch: more cost more than another batch."""


class StepAttention:
    """What both ways share: tokens, positions and slots of a step."""

    def __init__(
        self,
        cache: KVCache,
        blocks: BlockManager,
        chunks: Sequence[SequenceChunk],
        device: torch.device,
        padded: int,
    ) -> None:
        """`padded`: the row's length with padding, which is stored in the block of nobody."""
        self._cache, self._windows, self._device = cache, blocks.windows, device
        counts = [chunk.size for chunk in chunks]
        firsts = [chunk.sequence.computed for chunk in chunks]
        self.reach = max(first + count for first, count in zip(firsts, counts, strict=True))
        places = [np.arange(f, f + c) for f, c in zip(firsts, counts, strict=True)]
        self._positions = self._put(_filled(np.concatenate(places), padded))[None]
        self._slots = []
        for group in range(len(self._windows)):
            slots = [
                _slots(chunk.sequence.table.blocks[group], first, first + chunk.size)
                for chunk, first in zip(chunks, firsts, strict=True)
            ]
            self._slots.append(self._put(_filled(np.concatenate(slots), padded)))

    def positions(self) -> Tensor:
        """Positions [1, N] of the step's tokens."""
        return self._positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v [1, N, K, D]; mixed values [1, N, H, D] of q."""
        group = self._cache.groups[layer]
        self._cache.store(layer, self._slots[group], k[0], v[0])
        return self._mixed(layer, group, q[0], k[0], v[0])[None]

    def _mixed(self, layer: int, group: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def _put(self, numbers: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        host = torch.as_tensor(numbers, dtype=dtype)
        return host.to(self._device, non_blocking=True)


def _filled(numbers: Ints, length: int) -> Ints:
    return np.concatenate([numbers, np.zeros(length - len(numbers), np.int64)])


def _slots(blocks: Sequence[int], first: int, end: int) -> Ints:
    """Where the positions from `first` up to `end` of a request lie."""
    if end == first + 1:
        return np.array([blocks[first // BLOCK] * BLOCK + first % BLOCK])
    places = np.arange(first, end)
    lowest = first // BLOCK
    table = np.array(blocks[lowest : -(-end // BLOCK)])
    slots: Ints = table[places // BLOCK - lowest] * BLOCK + places % BLOCK
    return slots


@dataclass(frozen=True)
class _Batch:
    """Requests that attend together, padded to one shape."""

    queries: Tensor
    """[R, T] places in the step's row."""
    real: Tensor | None
    """[R, T] which of them are no padding; None: all are."""
    keys: Tensor | None
    """[R, S] slots; None: the step itself has all keys, at the same places as the queries."""
    mask: Tensor | None
    """[R, 1, T, S] which keys a query sees; None: all, or what causality says."""
    is_causal: bool = False


class GatheredAttention(StepAttention):
    """Keys are gathered from their blocks for torch's own attention; requests with about as many
    queries share a call, and those that go on from one prefix gather it once."""

    def __init__(
        self,
        cache: KVCache,
        blocks: BlockManager,
        chunks: Sequence[SequenceChunk],
        device: torch.device,
        padded: int,
    ) -> None:
        super().__init__(cache, blocks, chunks, device, padded)
        starts = np.cumsum([0, *(chunk.size for chunk in chunks)])
        families = _families(chunks)
        kinds = [_kind([chunks[r] for r in family]) for family in families]
        sizes = [
            sum(chunks[r].size for r in family)
            + (chunks[family[0]].sequence.computed if kind == NEARLY_WHOLE else 0)
            for family, kind in zip(families, kinds, strict=True)
        ]
        parts: list[list[int]] = []
        for number in sorted(range(len(families)), key=lambda n: (kinds[n], sizes[n])):
            last = parts[-1][0] if parts else -1
            room = PADDING if sizes[last] > 1 else 0
            if parts and kinds[last] == kinds[number] and sizes[number] - sizes[last] <= room:
                parts[-1].append(number)
            else:
                parts.append([number])
        self._apart = partial(self._batch, chunks, starts[:-1])
        self._has_family = FAMILY in kinds
        self._batches = []
        for group in range(len(self._windows)):
            batches = []
            for part in parts:
                if kinds[part[0]] == FAMILY:
                    some = [[(chunks[r], starts[r]) for r in families[n]] for n in part]
                    batches.append(self._family_batch(some, group))
                else:
                    rows = [families[n][0] for n in part]
                    make = self._batch if kinds[part[0]] == SINGLE else self._causal_batch
                    batches.append(make([chunks[r] for r in rows], starts[rows], group))
            self._batches.append(batches)

    def _batch(self, chunks: Sequence[SequenceChunk], starts: Ints, group: int) -> _Batch:
        window = self._windows[group]
        counts = np.array([chunk.size for chunk in chunks])
        firsts = np.array([chunk.sequence.computed for chunk in chunks])
        lanes = np.arange(counts.max())
        is_real = lanes < counts[:, None]
        queries = np.where(is_real, starts[:, None] + lanes, 0)
        real = None if is_real.all() else self._put(is_real, torch.bool)
        positions = firsts[:, None] + lanes
        ends = firsts + counts
        lowest = int(max(0, (firsts - window + 1).min())) // BLOCK * BLOCK if window else 0
        keys = np.arange(lowest, ends.max())
        slots = np.zeros((len(chunks), len(keys)), np.int64)
        for row, (chunk, end) in enumerate(zip(chunks, ends, strict=True)):
            table = chunk.sequence.table.blocks[group]
            slots[row, : end - lowest] = _slots(table, lowest, end)
        seen = keys <= positions[:, :, None]
        if window:
            seen &= keys > positions[:, :, None] - window
        # A query of padding must see something, or its softmax is empty.
        seen |= ~is_real[:, :, None]
        mask = None if seen.all() else self._put(seen, torch.bool)[:, None]
        return _Batch(self._put(queries), real, self._put(slots), mask)

    def _causal_batch(self, chunks: Sequence[SequenceChunk], starts: Ints, group: int) -> _Batch:
        """A query for each key, those that are not asked for included: causality is cheaper than a
        mask, whose hidden half is computed too."""
        window = self._windows[group]
        firsts = np.array([chunk.sequence.computed for chunk in chunks])
        ends = firsts + [chunk.size for chunk in chunks]
        lanes = np.arange(ends.max())
        is_real = (lanes >= firsts[:, None]) & (lanes < ends[:, None])
        # Padding is the request's own: a NaN that is masked spreads all the same.
        queries = starts[:, None] + np.where(is_real, lanes - firsts[:, None], 0)
        slots = mask = None
        if firsts.any():
            slots = np.zeros(queries.shape, np.int64)
            for row, (chunk, end) in enumerate(zip(chunks, ends, strict=True)):
                slots[row, :end] = _slots(chunk.sequence.table.blocks[group], 0, end)
        if 0 < window < len(lanes):
            distance = lanes[:, None] - lanes
            mask = self._put((distance >= 0) & (distance < window), torch.bool)[None, None]
        return _Batch(
            self._put(queries),
            None if is_real.all() else self._put(is_real, torch.bool),
            None if slots is None else self._put(slots),
            mask,
            is_causal=mask is None,
        )

    def _family_batch(
        self, families: Sequence[Sequence[tuple[SequenceChunk, int]]], group: int
    ) -> _Batch:
        """Each family is a row: queries of all its requests, and their prefix and own keys."""
        window = self._windows[group]
        shared = np.array([family[0][0].sequence.computed for family in families])
        counts = np.array([sum(chunk.size for chunk, _ in family) for family in families])
        lowest = max(0, shared.min() - window + 1) // BLOCK * BLOCK if window else 0
        common, shape = shared.max() - lowest, (len(families), counts.max())
        queries, positions, owners = (np.zeros(shape, np.int64) for _ in range(3))
        slots = np.zeros((shape[0], common + shape[1]), np.int64)
        for row, family in enumerate(families):
            first, known = family[0][0].sequence, shared[row]
            slots[row, : known - lowest] = _slots(first.table.blocks[group], lowest, known)
            at = 0
            for owner, (chunk, start) in enumerate(family):
                here, size = slice(at, at + chunk.size), chunk.size
                queries[row, here] = np.arange(start, start + size)
                positions[row, here] = np.arange(known, known + size)
                owners[row, here] = owner
                own = _slots(chunk.sequence.table.blocks[group], known, known + size)
                slots[row, common + at : common + at + size] = own
                at += size
        is_real = np.arange(shape[1]) < counts[:, None]
        keys = np.arange(lowest, lowest + common)
        before = np.broadcast_to((keys < shared[:, None])[:, None], (*shape, common))
        distance = positions[:, :, None] - positions[:, None]
        own_seen = (owners[:, :, None] == owners[:, None]) & (distance >= 0) & is_real[:, None]
        if window:
            before = before & (keys > positions[:, :, None] - window)
            own_seen &= distance < window
        seen = np.concatenate([before, own_seen], 2) | ~is_real[:, :, None]
        return _Batch(
            self._put(queries),
            None if is_real.all() else self._put(is_real, torch.bool),
            self._put(slots),
            self._put(seen, torch.bool)[:, None],
        )

    def _mixed(self, layer: int, group: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batches = self._batches[group]
        if self._has_family and not (k.isfinite().all() and v.isfinite().all()):
            # Masked or not, the keys of one of a family would spoil the answers of the others.
            batches = [self._apart(group)]
        out = torch.zeros_like(q)
        for batch in batches:
            if batch.keys is None:
                asked, keys, values = (part[batch.queries].transpose(1, 2) for part in (q, k, v))
            else:
                asked = q[batch.queries].transpose(1, 2)
                stored = self._cache.keys[layer], self._cache.values[layer]
                keys, values = (p[batch.keys].transpose(1, 2).to(q.dtype) for p in stored)
            mixed = F.scaled_dot_product_attention(
                asked,
                keys,
                values,
                attn_mask=batch.mask,
                is_causal=batch.is_causal,
                enable_gqa=keys.shape[1] != asked.shape[1],
            ).transpose(1, 2)
            if batch.real is None:
                out[batch.queries.flatten()] = mixed.flatten(0, 1)
            else:
                out[batch.queries[batch.real]] = mixed[batch.real]
        return out


def _kind(family: Sequence[SequenceChunk]) -> int:
    known = family[0].sequence.computed
    if len(family) > 1:
        return FAMILY
    if not known and family[0].size > 1:
        return WHOLE
    return NEARLY_WHOLE if 0 < known < family[0].size else SINGLE


def _families(chunks: Sequence[SequenceChunk]) -> list[list[int]]:
    """Numbers of chunks that attend as one row: those that go on from the same block, as answers to
    one question do, while their own keys are few beside those that they share."""
    families: list[list[int]] = []
    last: dict[tuple[int, int], tuple[list[int], int]] = {}
    for number, chunk in enumerate(chunks):
        sequence = chunk.sequence
        blocks, known = sequence.table.blocks[0], sequence.computed
        block = blocks[known // BLOCK - 1] if known and known % BLOCK == 0 else NOBODY
        family, size = last.get((known, block), ([], 0))
        if block == NOBODY or not family or size + chunk.size > known // FAMILY_SHARE:
            family, size = [], 0
            families.append(family)
        family.append(number)
        last[known, block] = family, size + chunk.size
    return families


class PagedAttention(StepAttention):
    """The Triton kernel reads keys where they lie; the step's tables are sent over once."""

    def __init__(
        self,
        cache: KVCache,
        blocks: BlockManager,
        chunks: Sequence[SequenceChunk],
        device: torch.device,
        padded: int,
    ) -> None:
        from foundling.model.kernels.paged_attention import QueryTiles, tile_queries

        super().__init__(cache, blocks, chunks, device, padded)
        counts = [chunk.size for chunk in chunks]
        self._starts = self._put(np.cumsum([0, *counts]), torch.int32)
        ends = [chunk.sequence.computed + chunk.size for chunk in chunks]
        self._lengths = self._put(ends, torch.int32)
        wide = max(-(-end // BLOCK) for end in ends)
        self._tables = []
        for group in range(len(self._windows)):
            table = np.zeros((len(chunks), wide), np.int32)
            for row, chunk in enumerate(chunks):
                mine = chunk.sequence.table.blocks[group]
                table[row, : len(mine)] = mine[:wide]
            self._tables.append(self._put(table, torch.int32))
        self._tile_queries, self._tiles_of = tile_queries, QueryTiles
        self._counts = counts
        self._tiles: QueryTiles | None = None

    def _mixed(self, layer: int, group: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from foundling.model.kernels.paged_attention import paged_attention

        if self._tiles is None:
            requests, firsts, rows = self._tile_queries(self._counts, q.shape[1] // k.shape[1])
            self._tiles = self._tiles_of(
                self._put(requests, torch.int32), self._put(firsts, torch.int32), rows
            )
        return paged_attention(
            q,
            self._cache.keys[layer],
            self._cache.values[layer],
            tables=self._tables[group],
            starts=self._starts,
            lengths=self._lengths,
            tiles=self._tiles,
            block=BLOCK,
            window=self._windows[group],
        )


def step_attention(device: torch.device) -> type[StepAttention]:
    """The way for a device."""
    return PagedAttention if device.type == "cuda" and has_triton() else GatheredAttention
