"""The inner part of the head's loss on a GPU: logits in, their gradient out, in one kernel.

The gradient takes the logits' place. A row is read twice, for the sum of exponentials and for the
gradient; the second time it is still in the cache. Written in plain PyTorch the same passes over
fp32 copies move about five times the bytes, and at a vocabulary of 131,072 that is more than the
optimizer costs. Rejected: compiling the plain form (Inductor makes three kernels and a wide copy of
it), and holding a row in registers (only one row fits on a multiprocessor, which then waits for
memory: 2.7 times as long at 32,768 logits).

With a softcap c and r = 1 / (exp(2 z / c) + 1), a bent logit is c - 2 c r: at most c, so that c
serves as the maximum and nothing has to be rescaled on the way; its slope is 4 r (1 - r).

Importing this needs triton; `loss.py` asks for it only where the logits are on a CUDA device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
WARPS = 16
BENT_BLOCK = 4096
BENT_WARPS = 8
MOST_BENT = 40.0
"""Up to here exp(-2 c), the smallest share of all, is a normal number in fp32."""


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    # Overflow gives the right answer, 1; a limit would turn NaN, which must be seen, into -1.
    return 1 - 2 / (tl.exp(2 * x) + 1)


@triton.jit
def _ignored(line, losses, row, vocab, lanes, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    for first in range(0, vocab, WIDTH):
        tl.store(line + first + lanes, 0.0, mask=first + lanes < vocab)
    tl.store(losses + row, 0.0)


@triton.jit
def _bent_loss_and_gradient(  # type: ignore[no-untyped-def]
    logits,
    targets,
    losses,
    stride,
    vocab,
    softcap,
    z_weight,
    IGNORED: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride
    lanes = tl.arange(0, WIDTH)
    target = tl.load(targets + row)
    if target == IGNORED:
        _ignored(line, losses, row, vocab, lanes, WIDTH)
        return
    twice = 2.8853900817779268  # 2 / ln 2: exponentials of base 2 are the device's own
    inner, outer = twice / softcap, -twice * softcap
    sums = tl.zeros([WIDTH], tl.float32)
    for first in range(0, vocab, WIDTH):
        inside = first + lanes < vocab
        x = tl.load(line + first + lanes, mask=inside, other=0.0, eviction_policy="evict_last")
        share = tl.exp2(outer / (tl.exp2(x.to(tl.float32) * inner) + 1))
        sums += tl.where(inside, share, 0.0)
    total = tl.sum(sums, 0)
    log_sum = softcap + tl.log(total)
    wanted = softcap * _tanh(tl.load(line + target).to(tl.float32) / softcap)
    tl.store(losses + row, log_sum - wanted + z_weight * log_sum * log_sum)
    # Every lane has read its target's logit before any overwrites it.
    tl.debug_barrier()
    scale = (1 + 2 * z_weight * log_sum) / total
    for first in range(0, vocab, WIDTH):
        inside = first + lanes < vocab
        x = tl.load(line + first + lanes, mask=inside, other=0.0, eviction_policy="evict_first")
        r = 1 / (tl.exp2(x.to(tl.float32) * inner) + 1)
        gradient = tl.exp2(outer * r) * scale - (first + lanes == target).to(tl.float32)
        tl.store(line + first + lanes, gradient * 4 * r * (1 - r), mask=inside)


@triton.jit
def _loss_and_gradient(  # type: ignore[no-untyped-def]
    logits,
    targets,
    losses,
    stride,
    vocab,
    softcap,
    z_weight,
    IGNORED: tl.constexpr,  # noqa: N803
    CAPPED: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride
    lanes = tl.arange(0, WIDTH)
    target = tl.load(targets + row)
    if target == IGNORED:
        _ignored(line, losses, row, vocab, lanes, WIDTH)
        return
    top, total = -float("inf"), 0.0
    for first in range(0, vocab, WIDTH):
        inside = first + lanes < vocab
        x = tl.load(
            line + first + lanes, mask=inside, other=-float("inf"), eviction_policy="evict_last"
        ).to(tl.float32)
        if CAPPED:
            x = tl.where(inside, softcap * _tanh(x / softcap), -float("inf"))
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    log_sum = top + tl.log(total)
    wanted = tl.load(line + target).to(tl.float32)
    if CAPPED:
        wanted = softcap * _tanh(wanted / softcap)
    tl.store(losses + row, log_sum - wanted + z_weight * log_sum * log_sum)
    # Every lane has read its target's logit before any overwrites it.
    tl.debug_barrier()
    scale = 1 + 2 * z_weight * log_sum
    for first in range(0, vocab, WIDTH):
        inside = first + lanes < vocab
        x = tl.load(line + first + lanes, mask=inside, other=-float("inf")).to(tl.float32)
        slope = 1.0
        if CAPPED:
            bent = _tanh(x / softcap)
            x, slope = softcap * bent, 1 - bent * bent
        gradient = tl.exp(x - log_sum) * scale - (first + lanes == target).to(tl.float32)
        tl.store(line + first + lanes, gradient * slope, mask=inside)


def loss_and_gradient_(
    logits: Tensor, targets: Tensor, *, ignored: int, softcap: float, z_weight: float
) -> Tensor:
    """Losses [n] in fp32 of logits [n, V], which become their own gradient; 0 where ignored."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    given = (logits, targets, losses, logits.stride(0), logits.shape[1], softcap, z_weight)
    grid = (len(logits),)
    if 0 < softcap <= MOST_BENT:
        _bent_loss_and_gradient[grid](
            *given, IGNORED=ignored, WIDTH=BENT_BLOCK, num_warps=BENT_WARPS
        )
    else:
        _loss_and_gradient[grid](
            *given, IGNORED=ignored, CAPPED=softcap > 0, WIDTH=BLOCK, num_warps=WARPS
        )
    return losses
