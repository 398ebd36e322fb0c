"""A step of AdamW with its moments in 8 bits as one kernel: read once, written once.

What adamw8bit.py spells out, block by block: two moments are unpacked, moved on, used and packed
again while they are in registers. A step with a NaN never comes here (train/step.py). A compiled
version of the plain form keeps the new codes beside the old ones for a moment, and costs the host
0.2 ms a call, in which the device stands: a model of 524 million parameters has 123 matrices.

Importing this needs triton; `adamw8bit.py` asks for it only where parameters are on a CUDA device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foundling.config.optim import MIN_MOMENT

NUMBERS = 2048
"""Of a parameter that one program updates, in whole blocks."""
WARPS = 4


@triton.jit
def _unpack(codes, scale, values, at, inside):  # type: ignore[no-untyped-def]
    code = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    return tl.load(values + code) * scale[:, None]


@triton.jit
def _pack(numbers, codes, scale, borders, at, blocks, inside, present, MIN_MOMENT: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    largest = tl.max(tl.abs(numbers), 1)
    unit = numbers / tl.maximum(largest, MIN_MOMENT)[:, None]
    # How many of the 255 borders lie below, by halving; of a NaN all do.
    below = tl.zeros_like(at).to(tl.int32)
    for power in tl.static_range(8):
        step = 128 >> power
        border = tl.load(borders + below + (step - 1))
        below += tl.where(border >= unit, 0, step)
    tl.store(codes + at, below.to(tl.uint8), mask=inside)
    tl.store(scale + blocks, largest, mask=present)


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    weight,
    grad,
    avg_codes,
    avg_scale,
    root_codes,
    root_scale,
    avg_values,
    avg_borders,
    root_values,
    root_borders,
    count,
    shrink,
    pace,
    correction,
    beta1,
    beta2,
    new1,
    new2,
    eps,
    BLOCK: tl.constexpr,  # noqa: N803
    BLOCKS: tl.constexpr,  # noqa: N803
    MIN_MOMENT: tl.constexpr,  # noqa: N803
):
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    present = blocks < count
    at = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = present[:, None]  # blocks are whole
    slope = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    old = tl.load(avg_scale + blocks, mask=present, other=0.0)
    avg = _unpack(avg_codes, old, avg_values, at, inside) * beta1 + slope * new1
    old = tl.load(root_scale + blocks, mask=present, other=0.0)
    root = _unpack(root_codes, old, root_values, at, inside)
    root = tl.sqrt(root * root * beta2 + slope * slope * new2)
    kept = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    kept = kept * shrink - pace * avg / (root * correction + eps)
    tl.store(weight + at, kept.to(weight.dtype.element_ty), mask=inside)
    _pack(avg, avg_codes, avg_scale, avg_borders, at, blocks, inside, present, MIN_MOMENT)
    _pack(root, root_codes, root_scale, root_borders, at, blocks, inside, present, MIN_MOMENT)


def step_(
    weight: Tensor,
    grad: Tensor,
    kept: list[Tensor],
    maps: list[Tensor],
    rates: tuple[float, float, float],
    fixed: tuple[float, float, float],
) -> None:
    """`adamw_8bit` of one parameter on a GPU, whose tensors are all contiguous."""
    count = kept[1].numel()
    block = weight.numel() // count
    beta1, beta2, eps = fixed
    blocks = max(1, NUMBERS // block)
    with torch.cuda.device(weight.device):
        _step[(triton.cdiv(count, blocks),)](
            weight,
            grad,
            *kept,
            *maps,
            count,
            *rates,
            beta1,
            beta2,
            1 - beta1,
            1 - beta2,
            eps,
            BLOCK=block,
            BLOCKS=blocks,
            MIN_MOMENT=MIN_MOMENT,
            num_warps=WARPS,
        )
