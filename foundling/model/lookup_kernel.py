"""Rows added to a table on a GPU, as they come: the backward pass of an embedding.

Importing this needs triton; `lookup.py` asks for it only where the table is on a CUDA device.
"""

import triton
import triton.language as tl
from torch import Tensor

WIDTH = 1024
WARPS = 4


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
    _add_rows[grid](table, tokens, rows.contiguous(), width, WIDTH=WIDTH, num_warps=WARPS)
