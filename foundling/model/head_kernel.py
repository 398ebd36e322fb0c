"""The inner part of the head's loss on a GPU: logits in, their gradient out, in one kernel.

The gradient takes the logits' place. A row is read twice, for the sum of exponentials and for the
gradient; the second time it is still in the cache. Written in plain PyTorch the same passes over
fp32 copies move about five times the bytes, and at a vocabulary of 131,072 that is more than the
optimizer costs. Rejected: compiling the plain form (Inductor makes three kernels and a wide copy of
it), and holding a row in registers (only one row fits on a multiprocessor, which then waits for
memory: 2.7 times as long at 32,768 logits).

With a softcap c and r = 1 / (exp(2 z / c) + 1), a bent logit is c - 2 c r: at most c, so that c
serves as the maximum and nothing has to be rescaled on the way; its slope is 4 r (1 - r). That is
three special functions a logit and pass, which is what the kernel waits for. Of bf16 logits on
NVIDIA's devices the hardware's tanh serves instead, one for two: it is off by 2^-11 at most where
the logit itself was rounded by 2^-9 (beyond three caps the slope, a hundredth there, may be off by
more of itself than that). A row's own target is bent exactly: where a model is sure, its share is
nearly the total, and what is left of its gradient must not be the tanh's rounding.

Importing this needs triton; `loss.py` asks for it only where the logits are on a CUDA device.
"""

from functools import lru_cache

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
def _share_and_slope(x, softcap, ROUGH: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """exp(b - c) and the slope of b, where b is x bent by the cap c."""
    reach = 1.4426950408889634 * softcap  # c / ln 2: exponentials of base 2 are the device's own
    if ROUGH:
        asm: tl.constexpr = "tanh.approx.f32 $0, $1;"
        bend = tl.inline_asm_elementwise(
            asm, "=f,f", [x * (1 / softcap)], dtype=tl.float32, is_pure=True, pack=1
        )
        share, slope = tl.exp2(reach * bend - reach), 1 - bend * bend
    else:
        r = 1 / (tl.exp2(x * (2.8853900817779268 / softcap)) + 1)
        share, slope = tl.exp2(-2 * reach * r), 4 * r * (1 - r)
    return share, slope


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
    ROUGH: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride
    lanes = tl.arange(0, WIDTH)
    target = tl.load(targets + row).to(tl.int32)
    if target == IGNORED:
        _ignored(line, losses, row, vocab, lanes, WIDTH)
        return
    wanted = tl.load(line + target).to(tl.float32)
    own_share, own_slope = _share_and_slope(wanted, softcap, False)
    sums = tl.zeros([WIDTH], tl.float32)
    for first in range(0, vocab, WIDTH):
        place = first + lanes
        x = tl.load(line + place, mask=place < vocab, other=0.0, eviction_policy="evict_last")
        share, _ = _share_and_slope(x.to(tl.float32), softcap, ROUGH)
        sums += tl.where((place < vocab) & (place != target), share, 0.0)
    others = tl.sum(sums, 0)
    total = own_share + others
    log_sum = softcap + tl.log(total)
    loss = log_sum - softcap * _tanh(wanted / softcap)
    tl.store(losses + row, loss + z_weight * log_sum * log_sum)
    # Every lane has read its target's logit before any overwrites it.
    tl.debug_barrier()
    scale = (1 + 2 * z_weight * log_sum) / total
    # The share of the total minus one; written so, nothing cancels where the model is sure.
    own_gradient = (2 * z_weight * log_sum * own_share - others) / total * own_slope
    for first in range(0, vocab, WIDTH):
        place = first + lanes
        x = tl.load(line + place, mask=place < vocab, other=0.0, eviction_policy="evict_first")
        share, slope = _share_and_slope(x.to(tl.float32), softcap, ROUGH)
        gradient = tl.where(place == target, own_gradient, share * scale * slope)
        tl.store(line + place, gradient, mask=place < vocab)


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
    target = tl.load(targets + row).to(tl.int32)
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


@lru_cache
def _has_tanh(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (7, 5)


def loss_and_gradient_(
    logits: Tensor, targets: Tensor, *, ignored: int, softcap: float, z_weight: float
) -> Tensor:
    """Losses [n] in fp32 of logits [n, V], which become their own gradient; 0 where ignored."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    given = (logits, targets, losses, logits.stride(0), logits.shape[1], softcap, z_weight)
    grid = (len(logits),)
    if 0 < softcap <= MOST_BENT:
        rough = logits.dtype == torch.bfloat16 and _has_tanh(logits.device)
        _bent_loss_and_gradient[grid](
            *given, IGNORED=ignored, ROUGH=rough, WIDTH=BENT_BLOCK, num_warps=BENT_WARPS
        )
    else:
        _loss_and_gradient[grid](
            *given, IGNORED=ignored, CAPPED=softcap > 0, WIDTH=BLOCK, num_warps=WARPS
        )
    return losses
