"""The squared ReLU: its value, its gradient, and what it keeps for it."""

import pytest
import torch

from foundling.model.activation import squared_relu


def test_gradients_are_those_of_the_formula() -> None:
    x = torch.randn(300, dtype=torch.float64, requires_grad=True)
    out = squared_relu(x)
    assert torch.equal(out, x.detach().clamp(min=0) ** 2)
    assert torch.autograd.gradcheck(squared_relu, (x[:20],))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_gradients_are_as_good_as_autograds(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.cat((torch.randn(4000), torch.randn(4000) * 1e-4)).to(dtype).requires_grad_()
    grad = torch.randn(8000, dtype=dtype)
    (found,) = torch.autograd.grad(squared_relu(x), x, grad)
    exact = 2 * x.detach().double().clamp(min=0) * grad.double()
    # Three roundings of the dtype's own.
    allowed = 3 * torch.finfo(dtype).eps * exact.abs() + torch.finfo(dtype).tiny
    assert ((found.double() - exact).abs() <= allowed).all()


def test_only_the_result_is_kept() -> None:
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    x = torch.randn(64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = squared_relu(x)
    assert kept == [out.data_ptr()]
