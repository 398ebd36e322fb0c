"""Products that end in something: relu(x W^T)^2, and the gradient before it, on a GPU with Triton.

A product of its own, and then a pass over its result, writes the widest tensor of a block, reads it
and writes it again. Here the end is done while a tile of the result is still in registers. Each
processor takes tile after tile, tiles come and go by the hardware's own copies (TMA, compute
capability 9), and the next tile's loads begin before the last one is stored.

Measured on an H200 (bf16, ms, beside cuBLAS and a pass; docs/log.md): 65,536 x 768 to 3072 forward
0.49 against 0.68, backward 0.62 against 0.78. Tiles of 128 x 128, two of them a processor, and the
kept squares loaded before the product were all slower.

Importing this needs triton; `activation.py` asks for it only where the tensors are on a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ROWS, COLUMNS, DEPTH = 128, 256, 64
"""Of a tile of the result, and how much of the inner side is taken at once."""
HALF = COLUMNS // 2
TOGETHER = 8
"""Tiles of one column that follow each other, so that both sides stay in the cache."""
STAGES, WARPS = 3, 8


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
            num_warps=WARPS,
        )
    return out
