"""Drawing tokens on CUDA: one pass over the logits gives token and log-probability of each row.

The same function as `foundling.generate.sampling.draw`, noise included, which a test holds equal.
Left to torch it is some thirty passes over the vocabulary, and compiled one slow reduction. Here a
row is cut into parts, each part finds its best sum of logit and noise and its share of the
normaliser, and a second kernel joins the parts.

Shapes: B rows, V vocabulary, P parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

STRIP = 1024
"""Logits that a program looks at together."""
LEAST_PART = 4096
MOST_PARTS = 64


@triton.jit
def _mix64(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _mix32(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _draw_part(  # type: ignore[no-untyped-def]
    found,
    ids,
    logits,
    temperatures,
    seeds,
    positions,
    size,
    stride,
    share,
    STRIP: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
):
    row, part = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures + row).to(tl.float32)
    seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    position = tl.load(positions + row).to(tl.uint64, bitcast=True)
    key = _mix64(seed ^ _mix64(position + 0x9E3779B97F4A7C15))
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    first = part * share
    best, best_id, best_logit = float("-inf"), 0, float("-inf")
    top, total, broken = float("-inf"), 0.0, 0
    for strip in range(first, min(first + share, size), STRIP):
        token = strip + tl.arange(0, STRIP)
        is_token = token < min(first + share, size)
        logit = tl.load(
            logits + row.to(tl.int64) * stride + token, mask=is_token, other=float("-inf")
        )
        logit = logit.to(tl.float32)
        broken += tl.sum(((logit != logit) | (logit == float("inf"))).to(tl.int32), 0)
        score = logit
        if temperature > 0:
            hashed = _mix32(_mix32(token.to(tl.uint32) * 0x9E3779B1 + low) ^ high)
            uniform = ((hashed & 0x7FFFFFFF).to(tl.float32) + 0.5) * (1.0 / 2147483648)
            # Times the temperature, and not divided by it: a tiny one cannot overflow.
            score = logit - temperature * libdevice.log(-libdevice.log1p(-uniform))
        here, at = tl.max(score, 0, return_indices=True)
        if here > best:
            best, best_id = here, strip + at
            best_logit = tl.max(tl.where(token == best_id, logit, float("-inf")), 0)
        higher = tl.maximum(top, tl.max(logit, 0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(logit - safe), 0)
        top = higher
    place = found + (row * PARTS + part) * 4
    tl.store(place, best)
    tl.store(place + 1, best_logit)
    safe_total = tl.where(total == 0, 1.0, total)
    tl.store(place + 2, tl.where(total == 0, float("-inf"), top + tl.log(safe_total)))
    tl.store(place + 3, broken * 1.0)
    tl.store(ids + row * PARTS + part, best_id)


@triton.jit
def _draw_join(  # type: ignore[no-untyped-def]
    tokens,
    logprobs,
    found,
    ids,
    PARTS: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    place = found + (row * PARTS + part) * 4
    best = tl.load(place)
    _, winner = tl.max(best, 0, return_indices=True)
    token = tl.load(ids + row * PARTS + winner)
    logit = tl.load(found + (row * PARTS + winner) * 4 + 1)
    logsums = tl.load(place + 2)
    top = tl.max(logsums, 0)
    logsum = top + tl.log(tl.sum(tl.exp(logsums - top), 0))
    broken = tl.sum(tl.load(place + 3), 0) > 0
    tl.store(tokens + row, tl.where(broken | (top == float("-inf")), -1, token).to(tl.int64))
    tl.store(logprobs + row, logit - logsum)


def draw_on_cuda(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """(token ids [B], their log-probabilities [B]) for logits [B, V] of any precision; -1 for a row
    with NaN or infinity."""
    rows, size = logits.shape
    parts = min(MOST_PARTS, triton.next_power_of_2(triton.cdiv(size, LEAST_PART)))
    share = triton.cdiv(triton.cdiv(size, parts), STRIP) * STRIP
    device = logits.device
    found = torch.empty(rows, parts, 4, dtype=torch.float32, device=device)
    ids = torch.empty(rows, parts, dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    with torch.cuda.device(device):
        _draw_part[(rows, parts)](
            found, ids, logits, temperatures, seeds, positions, size, logits.stride(0), share,
            STRIP=STRIP, PARTS=parts,
        )  # fmt: skip
        _draw_join[(rows,)](tokens, logprobs, found, ids, PARTS=parts, num_warps=1)
    return tokens, logprobs
