"""The first columns of a tensor for a small product beside a large one.

Left to autograd, their gradient is widened with zeros and added to the large product's: the
compiler then fuses the padding into the norm's backward pass, whose kernel becomes slower by half
(docs/log.md). Here it is added where the large product's gradient lies, a kernel of a few columns.
"""

from typing import Any

import torch
from torch import Tensor


def with_front(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(x, its first `width` columns). This x is for one product: of several, the gradients would be
    summed by themselves before the columns' is added, a pass over the whole tensor.

    Where nothing is compiled there is nothing to fuse, and plain slices do.
    """
    if not (torch.compiler.is_compiling() and x.device.type == "cuda"):
        return x, x[..., :width]
    whole, front = _WithFront.apply(x, width)  # type: ignore[no-untyped-call]
    return whole, front


class _WithFront(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int) -> tuple[Tensor, Tensor]:
        return x.view_as(x), x[..., :width]

    @staticmethod
    def backward(ctx: Any, whole: Tensor, front: Tensor) -> tuple[Tensor, None]:
        # The compiler copies it first, should anything else need it as it was.
        add_to_front(whole, front)
        return whole, None


@torch.library.custom_op("foundling::add_to_front", mutates_args={"whole"})
def add_to_front(whole: Tensor, front: Tensor) -> None:
    """Add to the first columns."""
    whole[..., : front.shape[-1]] += front


@add_to_front.register_fake
def _(whole: Tensor, front: Tensor) -> None:
    return None
