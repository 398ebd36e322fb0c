"""Paged attention: queries over keys and values that lie in blocks, one Triton kernel.

A step of the engine mixes single tokens (decode) with pieces of prompts (chunked prefill), so
queries of all requests lie end to end and each request brings a table of the blocks that hold its
keys. One program takes a tile of queries of one request and all query heads that share a
key/value head, so that keys are read once for the group. Where tiles are too few to fill a GPU,
as in decoding a small batch, the context is split over programs and a second kernel joins the
parts. The number of parts depends on shapes alone, so that a CUDA graph can hold the launch.

Rejected: a kernel for decode and another for prefill (the same loop twice), and gathering keys
before SDPA (every key is written and read once more; measured beside this in tests/gpu).

Shapes: N queries of all requests, R requests, H query heads, K key/value heads, D head width,
S slots of the cache (blocks x tokens in a block), B blocks of the longest request.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

DECODE_TILE, PREFILL_TILE = 16, 64
"""Rows of a tile: queries times the heads of a group. 16 is the least that a matrix unit takes."""
MOST_PARTS = 32


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    out,
    sums,
    q,
    keys,
    values,
    tables,
    starts,
    lengths,
    tile_request,
    tile_first,
    scale,
    softcap,
    q_stride,
    table_stride,
    HEADS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    WIDTH_PADDED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    STRIP: tl.constexpr,  # noqa: N803
    WINDOW: tl.constexpr,  # noqa: N803
    SOFTCAP: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
):
    request = tl.load(tile_request + tl.program_id(0))
    first = tl.load(tile_first + tl.program_id(0))  # the tile's first query, within its request
    kv_head, part = tl.program_id(1), tl.program_id(2)
    start, end = tl.load(starts + request), tl.load(starts + request + 1)
    length = tl.load(lengths + request)
    count = end - start
    rows = tl.arange(0, TILE)
    query, head = first + rows // GROUP, kv_head * GROUP + rows % GROUP
    is_row = (rows < (TILE // GROUP) * GROUP) & (query < count)
    position = length - count + query
    lanes = tl.arange(0, WIDTH_PADDED)
    is_lane = lanes < WIDTH
    flat = (start + query).to(tl.int64)
    at = flat[:, None] * q_stride + head[:, None] * WIDTH + lanes
    asked = tl.load(q + at, mask=is_row[:, None] & is_lane, other=0.0)

    stop = tl.minimum(length - count + first + TILE // GROUP, length)
    begin = 0
    if WINDOW:
        begin = tl.maximum(length - count + first - WINDOW + 1, 0) // STRIP * STRIP
    share = tl.cdiv(tl.cdiv(stop - begin, STRIP), PARTS) * STRIP
    begin += part * share
    stop = tl.minimum(stop, begin + share)

    best = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    mixed = tl.zeros((TILE, WIDTH_PADDED), tl.float32)
    for strip in range(begin, stop, STRIP):
        key = strip + tl.arange(0, STRIP)
        is_key = key < stop
        if WINDOW:  # blocks behind it may be another request's by now
            is_key &= key > length - count + first - WINDOW
        block = tl.load(tables + request * table_stride + key // BLOCK, mask=is_key, other=0)
        slot = block.to(tl.int64) * BLOCK + key % BLOCK
        place = slot[:, None] * (HEADS // GROUP * WIDTH) + kv_head * WIDTH + lanes
        seen = is_key[:, None] & is_lane
        k = tl.load(keys + place, mask=seen, other=0.0)
        v = tl.load(values + place, mask=seen, other=0.0)
        scores = tl.dot(asked, k.T, input_precision=PRECISION) * scale
        if SOFTCAP:
            bent = scores / softcap  # tanh by exp, which every Triton has
            scores = softcap * (1 - 2 / (tl.exp(2 * bent) + 1))
        is_seen = is_key & (key <= position[:, None])
        if WINDOW:
            is_seen &= key > position[:, None] - WINDOW
        scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
        weights = tl.exp(scores - safe[:, None])
        faded = tl.exp(best - safe)
        total = total * faded + tl.sum(weights, 1)
        mixed = mixed * faded[:, None]
        mixed = tl.dot(weights.to(v.dtype), v, mixed, input_precision=PRECISION)
        best = higher

    mixed = mixed / tl.where(total == 0, 1.0, total)[:, None]
    row = (flat * HEADS + head) * PARTS + part
    wanted = is_row[:, None] & is_lane
    tl.store(out + row[:, None] * WIDTH + lanes, mixed.to(out.dtype.element_ty), mask=wanted)
    if PARTS > 1:
        empty = total == 0
        logsum = tl.where(empty, float("-inf"), best + tl.log(tl.where(empty, 1.0, total)))
        tl.store(sums + row, logsum, mask=is_row)


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    out,
    parts,
    sums,
    WIDTH: tl.constexpr,  # noqa: N803
    WIDTH_PADDED: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    lanes, part = tl.arange(0, WIDTH_PADDED), tl.arange(0, PARTS)
    logsum = tl.load(sums + row * PARTS + part)
    weights = tl.exp(logsum - tl.max(logsum, 0))
    weights = weights / tl.sum(weights, 0)
    at = (row * PARTS + part)[:, None] * WIDTH + lanes
    mixed = tl.load(parts + at, mask=lanes < WIDTH, other=0.0)
    joined = tl.sum(mixed * weights[:, None], 0)
    place = out + row * WIDTH + lanes
    tl.store(place, joined.to(out.dtype.element_ty), mask=lanes < WIDTH)


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    keys,
    values,
    k,
    v,
    slots,
    k_stride,
    v_stride,
    WIDTH: tl.constexpr,  # noqa: N803
    WIDTH_PADDED: tl.constexpr,  # noqa: N803
):
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH_PADDED)
    is_lane = lanes < WIDTH
    place = tl.load(slots + row) * WIDTH + lanes
    tl.store(keys + place, tl.load(k + row * k_stride + lanes, mask=is_lane), mask=is_lane)
    tl.store(values + place, tl.load(v + row * v_stride + lanes, mask=is_lane), mask=is_lane)


def store_paged(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k and v [N, K, D] into these slots [N] of keys and values [S, K, D], in one launch."""
    width = keys.shape[1] * keys.shape[2]
    k, v = k.flatten(1), v.flatten(1)
    with torch.cuda.device(k.device):
        _store[(len(slots),)](
            keys, values, k, v, slots, k.stride(0), v.stride(0),
            WIDTH=width, WIDTH_PADDED=triton.next_power_of_2(width),
        )  # fmt: skip


@dataclass(frozen=True)
class QueryTiles:
    """Which queries each program takes; made once a step and read by every layer."""

    request: Tensor
    """The request of each tile, int32."""
    first: Tensor
    """Its first query, counted within the request, int32."""
    rows: int
    """Rows of a tile: DECODE_TILE or PREFILL_TILE."""


def tile_queries(counts: list[int], group: int) -> tuple[list[int], list[int], int]:
    """(request, first query) of each tile for so many queries a request, and the tile's rows."""
    rows = DECODE_TILE if max(counts) * group <= DECODE_TILE else max(PREFILL_TILE, group)
    each = rows // group
    tiles = [(r, first) for r, count in enumerate(counts) for first in range(0, count, each)]
    return [request for request, _ in tiles], [first for _, first in tiles], rows


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    tiles: QueryTiles,
    block: int,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Mixed values [N, H, D] of queries q [N, H, D] over keys and values [S, K, D].

    `tables` [R, B] has the blocks of each request, `starts` [R + 1] where its queries begin,
    `lengths` [R] its keys, those of this step included: query i of c stands at position
    length - c + i. A window hides what is `window` or more positions back (0: nothing).
    """
    count, heads, width = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    parts = _parts(len(tiles.request) * kv_heads, q.device) if tiles.rows == DECODE_TILE else 1
    padded = max(16, triton.next_power_of_2(width))
    out = torch.empty(count, heads, width, dtype=q.dtype, device=q.device)
    mixed, sums = out, out
    if parts > 1:
        mixed = torch.empty(count, heads, parts, width, dtype=torch.float32, device=q.device)
        sums = torch.empty(count, heads, parts, dtype=torch.float32, device=q.device)
    strip = 64 if q.dtype.itemsize <= 2 and padded <= 128 else 32
    with torch.cuda.device(q.device):
        _attend[(len(tiles.request), kv_heads, parts)](
            mixed, sums, q, keys, values, tables, starts, lengths, tiles.request, tiles.first,
            width**-0.5, softcap, q.stride(0), tables.stride(0),
            HEADS=heads, GROUP=group, WIDTH=width, WIDTH_PADDED=padded, BLOCK=block,
            TILE=triton.next_power_of_2(tiles.rows), STRIP=strip, WINDOW=window,
            SOFTCAP=softcap > 0, PARTS=parts,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=4, num_stages=3,
        )  # fmt: skip
        if parts > 1:
            _join[(count * heads,)](
                out, mixed, sums, WIDTH=width, WIDTH_PADDED=padded, PARTS=parts, num_warps=1
            )
    return out


def _parts(programs: int, device: torch.device) -> int:
    """Into how many parts, a power of two, the context is split so that no processor idles."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    parts = 1
    while parts < MOST_PARTS and programs * parts * 2 <= 4 * processors:
        parts *= 2
    return parts
