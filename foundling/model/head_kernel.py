"""The inner part of the head's loss on a GPU: logits in, their gradient out, in one kernel.

The gradient takes the logits' place. A row that fits is held in registers and read once; a longer
one is read twice, for the sum of exponentials and for the gradient. Written in plain PyTorch the
same passes over fp32 copies move about five times the bytes, and at a vocabulary of 131,072 that is
more than the optimizer costs. Rejected: compiling the plain form (Inductor makes three kernels and
a wide copy of it).

Importing this needs triton; `loss.py` asks for it only where the logits are on a CUDA device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
WARPS = 16
LONGEST_HELD = 1 << 15
HOLDING_WARPS = 32


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    # Of an argument that cannot overflow: beyond 15 it is 1 in fp32.
    return 1 - 2 / (tl.exp(2 * tl.minimum(tl.maximum(x, -15.0), 15.0)) + 1)


@triton.jit
def _held_loss_and_gradient(  # type: ignore[no-untyped-def]
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
    lanes = tl.arange(0, WIDTH)
    inside = lanes < vocab
    place = logits + row * stride + lanes
    target = tl.load(targets + row)
    if target == IGNORED:
        tl.store(place, tl.zeros([WIDTH], tl.float32), mask=inside)
        tl.store(losses + row, 0.0)
        return
    x = tl.load(place, mask=inside, other=-float("inf")).to(tl.float32)
    if CAPPED:
        x = tl.where(inside, softcap * _tanh(x / softcap), -float("inf"))
    top = tl.max(x, 0)
    shares = tl.exp(x - top)
    total = tl.sum(shares, 0)
    log_sum = top + tl.log(total)
    wanted = tl.sum(tl.where(lanes == target, x, 0.0), 0)
    tl.store(losses + row, log_sum - wanted + z_weight * log_sum * log_sum)
    gradient = shares * ((1 + 2 * z_weight * log_sum) / total)
    gradient -= (lanes == target).to(tl.float32)
    if CAPPED:
        bent = x / softcap
        gradient *= 1 - bent * bent
    tl.store(place, gradient, mask=inside)


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
        for first in range(0, vocab, WIDTH):
            tl.store(line + first + lanes, 0.0, mask=first + lanes < vocab)
        tl.store(losses + row, 0.0)
        return
    top, total = -float("inf"), 0.0
    for first in range(0, vocab, WIDTH):
        x = tl.load(line + first + lanes, mask=first + lanes < vocab, other=-float("inf"))
        x = x.to(tl.float32)
        if CAPPED:
            x = tl.where(first + lanes < vocab, softcap * _tanh(x / softcap), -float("inf"))
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
    vocab = logits.shape[1]
    held = vocab <= LONGEST_HELD
    kernel = _held_loss_and_gradient if held else _loss_and_gradient
    kernel[(len(logits),)](
        logits,
        targets,
        losses,
        logits.stride(0),
        vocab,
        softcap,
        z_weight,
        IGNORED=ignored,
        CAPPED=softcap > 0,
        WIDTH=triton.next_power_of_2(vocab) if held else BLOCK,
        num_warps=HOLDING_WARPS if held and vocab > BLOCK else WARPS,
    )
    return losses
