"""The first columns of a tensor beside the whole: the same gradients as slices have."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foundling.model.front import _WithFront, with_front


def parts(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 5, 16), (16, 16), (16, 16), (3, 4))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def through(split: Any, x: Tensor, other: Tensor, large: Tensor, small: Tensor) -> Tensor:
    """A norm, a product that shares its input, a large one and a small one, as attention has."""
    normed = F.rms_norm(x, (16,))
    whole, front = split(normed, 4)
    gate = torch.sigmoid(front @ small.t()).sum(-1, keepdim=True)
    return normed @ other + (whole @ large) * gate


def gradients(split: Any, *, compiled: bool) -> list[Tensor]:
    torch._dynamo.reset()
    inputs = parts()
    run = torch.compile(through, backend="aot_eager", fullgraph=True) if compiled else through
    out = run(split, *inputs)
    return list(torch.autograd.grad(out, inputs, torch.cos(out.detach())))


def sliced(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    return x, x[..., :width]


def added(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    whole, front = _WithFront.apply(x, width)
    return whole, front


@pytest.mark.filterwarnings("ignore")  # torch's compiler about itself
def test_the_gradient_is_added_where_the_large_products_lies() -> None:
    right = gradients(sliced, compiled=False)
    for found, wanted in zip(gradients(added, compiled=True), right, strict=True):
        torch.testing.assert_close(found, wanted)
    assert float(right[3].norm()) > 0


def test_where_nothing_is_compiled_slices_do() -> None:
    x = parts()[0]
    whole, front = with_front(x, 4)
    assert whole is x
    assert torch.equal(front, x[..., :4])
    for found, wanted in zip(
        gradients(with_front, compiled=True), gradients(sliced, compiled=False), strict=True
    ):
        torch.testing.assert_close(found, wanted)
