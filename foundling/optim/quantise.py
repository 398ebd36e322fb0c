"""Numbers in 8 bits: dynamic tree quantisation (Dettmers 2016) over blocks within a row.

A block's largest magnitude becomes its scale, and each number one of 256 values between -1 and 1
(or 0 and 1) that lie the denser the nearer to zero, over seven powers of ten.

A block never leaves its row, and all of a row's blocks are equally long: so the codes [R, C] and
the scales [R, C / block] of a matrix can be cut along rows, and along whole blocks of columns, as
the matrix is: what a rank holds does not depend on the layout, nor does a checkpoint. Rejected:
blocks of the flattened tensor (torchao, bitsandbytes), which begin anew in every rank's part.
"""

from functools import lru_cache

import torch
from torch import Tensor

DECADES = 7
LEAST = 1e-30
"""Of a scale that is divided by."""


@lru_cache(maxsize=16)
def table(signed: bool, device: torch.device) -> Tensor:
    """The 256 values, rising. Of each power of ten there are twice as many as of the one below;
    each stands for the middle of its piece of (0.1, 1]."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        pieces = 2 ** (decade if signed else decade + 1)
        width = 0.9 / pieces
        middles = [0.1 + width * (piece + 0.5) for piece in range(pieces)]
        found = [10.0 ** (decade - DECADES + 1) * middle for middle in middles]
        values += found + ([-value for value in found] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@lru_cache(maxsize=16)
def bounds(signed: bool, device: torch.device) -> Tensor:
    """The 255 borders between one value and the next.

    Without a sign, only zero becomes zero: the root of a second moment that was rounded down to
    nothing would let the update beside it explode.
    """
    values = table(signed, device)
    middles = (values[1:] + values[:-1]) / 2
    if not signed:
        middles[0] = 0.0
    return middles


def unpack(codes: Tensor, scale: Tensor, values: Tensor) -> Tensor:
    """The numbers that codes [R, C] and scales [R, C / block] stand for."""
    rows, columns = codes.shape
    found = values[codes.int()].view(rows, scale.shape[1], -1) * scale.unsqueeze(-1)
    return found.view(rows, columns)


def pack(numbers: Tensor, blocks: int, borders: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of numbers [R, C], in so many blocks a row."""
    rows, columns = numbers.shape
    cut = numbers.view(rows, blocks, columns // blocks)
    scale = cut.abs().amax(-1)
    unit = cut / scale.clamp(min=LEAST).unsqueeze(-1)
    codes = torch.bucketize(unit, borders, out_int32=True)
    return codes.to(torch.uint8).view(rows, columns), scale
