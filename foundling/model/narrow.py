"""Products of float8 numbers for the head, whose products are the loss's own (loss.py): torchao
exchanges linear layers, and the head is none that anybody calls.

Only logits are made so. The two products behind their gradient stay as they were: one of them is
added up in fp32, which no float8 product does, and the other was not tried. Scales are powers of
two: multiplied by one, a number in bf16 keeps its digits, and is rounded once.

Shapes: N rows, C width, V vocabulary.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["tensorwise", "rowwise"]
"""One scale for a whole tensor, or one for each of its rows."""
KIND = torch.float8_e4m3fn
MOST = float(torch.finfo(KIND).max)
LEAST = 1e-30
"""A row of zeros has a scale too."""


class Narrow(NamedTuple):
    """A matrix in float8, and what each number (or each row) of it is to be multiplied by."""

    numbers: Tensor
    scale: Tensor
    """fp32, without dimensions or [rows, 1]."""

    @property
    def kind(self) -> Kind:
        """How it was scaled."""
        return "rowwise" if self.scale.dim() else "tensorwise"


def narrowed(wide: Tensor, kind: Kind) -> Narrow:
    """A matrix as float8 holds it, as large as fits."""
    low, high = wide.aminmax(dim=1, keepdim=True) if kind == "rowwise" else wide.aminmax()
    largest = torch.maximum(-low, high).float().clamp(min=LEAST)
    up = torch.exp2(torch.floor(torch.log2(MOST / largest)))
    return Narrow((wide * up.to(wide.dtype)).to(KIND), 1 / up)


def narrow_product(wide: Tensor, right: Narrow) -> Tensor:
    """[N, C] and [V, C] to their products [N, V], as wide as the first, which is narrowed likewise.
    Where there is no such unit (a CPU), the same numbers are multiplied in fp32."""
    left = narrowed(wide, right.kind)
    if wide.device.type == "cuda":
        found: Tensor = torch._scaled_mm(
            left.numbers,
            right.numbers.t(),
            scale_a=left.scale,
            scale_b=right.scale.t() if right.kind == "rowwise" else right.scale,
            out_dtype=wide.dtype,
            use_fast_accum=True,  # as torchao's forward products: rounded to bf16 in the end
        )
        return found
    exact = (left.numbers.float() * left.scale) @ (right.numbers.float() * right.scale).t()
    return exact.to(wide.dtype)
