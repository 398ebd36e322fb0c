"""Triton kernels: squared ReLU, cross-entropy of the head, embedding backward."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Products that end in something: relu(x W^T)^2, and the gradient before it, on a GPU with Triton.
#
# A product of its own, and then a pass over its result, writes the widest tensor of a block, reads
# it and writes it again. Here the end is done while a tile of the result is still in registers.
# Each processor takes tile after tile, tiles come and go by the hardware's own copies (TMA, compute
# capability 9), and the next tile's loads begin before the last one is stored.
#
# Measured on an H200 (bf16, ms, beside cuBLAS and a pass; docs/log.md): 65,536 x 768 to 3072
# forward 0.49 against 0.68, backward 0.62 against 0.78. Tiles of 128 x 128, two of them a
# processor, and the kept squares loaded before the product were all slower.
#
# Importing this needs triton; `model/mlp.py` asks for it only where the tensors are on a GPU.

ROWS, COLUMNS, DEPTH = 128, 256, 64
"""Of a tile of the result, and how much of the inner side is taken at once."""
HALF = COLUMNS // 2
TOGETHER = 8
"""Tiles of one column that follow each other, so that both sides stay in the cache."""
STAGES, MLP_WARPS = 3, 8


@triton.jit
def _place(tile, tall, wide, TOGETHER: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Row and column of a tile in the order in which they are taken."""
    band = tile // (TOGETHER * wide)
    first = band * TOGETHER
    rows = min(tall - first, TOGETHER)
    within = tile % (TOGETHER * wide)
    return first + within % rows, within // rows


@triton.jit
def _ended(sums, squares, row, column, SLOPED: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    if SLOPED:  # the slope of a square that is kept is twice its root
        return (sums * 2 * tl.sqrt(squares.load([row, column]).to(tl.float32))).to(tl.bfloat16)
    bent = tl.where(sums < 0, 0.0, sums)  # unlike a maximum, this lets a NaN be seen
    return (bent * bent).to(tl.bfloat16)


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    left,
    right,
    squares,
    out,
    height,
    width,
    depth,
    SLOPED: tl.constexpr,  # noqa: N803
    PROCESSORS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr,  # noqa: N803
    TOGETHER: tl.constexpr,  # noqa: N803
):
    tall, wide = tl.cdiv(height, ROWS), tl.cdiv(width, COLUMNS)
    ended = tl.program_id(0) - PROCESSORS
    for tile in tl.range(tl.program_id(0), tall * wide, PROCESSORS, flatten=True):
        row, column = _place(tile, tall, wide, TOGETHER)
        sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for inner in range(tl.cdiv(depth, DEPTH)):
            strip = left.load([row * ROWS, inner * DEPTH])
            if SLOPED:
                sums = tl.dot(strip, right.load([inner * DEPTH, column * COLUMNS]), sums)
            else:
                sums = tl.dot(strip, right.load([column * COLUMNS, inner * DEPTH]).T, sums)
        # Counted apart from `tile`, so that the next one's loads need not wait for these stores.
        ended += PROCESSORS
        row, column = _place(ended, tall, wide, TOGETHER)
        row, column = row * ROWS, column * COLUMNS
        # In two halves, so that there is room for three stages of loads.
        halves = tl.permute(tl.reshape(sums, (ROWS, 2, COLUMNS // 2)), (0, 2, 1))
        first, second = tl.split(halves)
        out.store([row, column], _ended(first, squares, row, column, SLOPED))
        column += COLUMNS // 2
        out.store([row, column], _ended(second, squares, row, column, SLOPED))


def squared(x: Tensor, weight: Tensor) -> Tensor:
    """relu(x [N, C] @ weight [F, C]^T)^2, all in bf16."""
    return _launch(x, weight, None, len(weight))


def sloped(grad: Tensor, weight: Tensor, squares: Tensor) -> Tensor:
    """(grad [N, C] @ weight [C, F]) * 2 sqrt(squares [N, F]), all in bf16."""
    return _launch(grad, weight, squares, weight.shape[1])


def _launch(left: Tensor, right: Tensor, squares: Tensor | None, width: int) -> Tensor:
    height, depth = left.shape
    out = torch.empty(height, width, dtype=left.dtype, device=left.device)
    is_sloped = squares is not None
    block = [DEPTH, COLUMNS] if is_sloped else [COLUMNS, DEPTH]
    tiles = triton.cdiv(height, ROWS) * triton.cdiv(width, COLUMNS)
    processors = torch.cuda.get_device_properties(left.device).multi_processor_count
    processors = min(processors, tiles)
    with torch.cuda.device(left.device):
        _product[(processors,)](
            TensorDescriptor.from_tensor(left, [ROWS, DEPTH]),
            TensorDescriptor.from_tensor(right, block),
            TensorDescriptor.from_tensor(out if squares is None else squares, [ROWS, HALF]),
            TensorDescriptor.from_tensor(out, [ROWS, HALF]),
            height,
            width,
            depth,
            SLOPED=is_sloped,
            PROCESSORS=processors,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            DEPTH=DEPTH,
            TOGETHER=TOGETHER,
            num_stages=STAGES,
            num_warps=MLP_WARPS,
        )
    return out


# The inner part of the head's loss on a GPU: logits in, their gradient out, in one kernel.
#
# The gradient takes the logits' place. A row is read twice, for the sum of exponentials and for the
# gradient; the second time it is still in the cache. Written in plain PyTorch the same passes over
# fp32 copies move about five times the bytes, and at a vocabulary of 131,072 that is more than the
# optimizer costs. Rejected: compiling the plain form (Inductor makes three kernels and a wide copy
# of it), and holding a row in registers (only one row fits on a multiprocessor, which then waits
# for memory: 2.7 times as long at 32,768 logits).
#
# With a softcap c and r = 1 / (exp(2 z / c) + 1), a bent logit is c - 2 c r: at most c, so that c
# serves as the maximum and nothing has to be rescaled on the way; its slope is 4 r (1 - r). That is
# three special functions a logit and pass, which is what the kernel waits for. Of bf16 logits on
# NVIDIA's devices the hardware's tanh serves instead, one for two: it is off by 2^-11 at most where
# the logit itself was rounded by 2^-9 (beyond three caps the slope, a hundredth there, may be off
# by more of itself than that). A row's own target is bent exactly: where a model is sure, its share
# is nearly the total, and what is left of its gradient must not be the tanh's rounding.
#
# Importing this needs triton; `loss.py` asks for it only where the logits are on a CUDA device.

BLOCK = 8192
LOSS_WARPS = 16
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
            *given, IGNORED=ignored, CAPPED=softcap > 0, WIDTH=BLOCK, num_warps=LOSS_WARPS
        )
    return losses


# Rows added to a table on a GPU, as they come: the backward pass of an embedding.
#
# Importing this needs triton; `model/layers.py` asks for it only where the table is on a CUDA
# device.

WIDTH = 1024
EMBEDDING_WARPS = 4


@triton.jit
def _add_rows(table, tokens, rows, width, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    number = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = lanes < width
    token = tl.load(tokens + number).to(tl.int64)
    row = tl.load(rows + number * width + lanes, mask=inside, other=0.0).to(tl.float32)
    tl.atomic_add(table + token * width + lanes, row, mask=inside, sem="relaxed")


def add_rows_(table: Tensor, tokens: Tensor, rows: Tensor) -> None:
    """table[tokens[i]] += rows[i], table [V, C] in fp32, tokens [n], rows [n, C] of any precision.

    The order of additions is the device's: two runs may differ in the last bits.
    """
    width = table.shape[1]
    grid = (len(tokens), triton.cdiv(width, WIDTH))
    _add_rows[grid](table, tokens, rows.contiguous(), width, WIDTH=WIDTH, num_warps=EMBEDDING_WARPS)
