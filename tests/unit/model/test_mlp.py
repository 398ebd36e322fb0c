"""The squared ReLU: its value, its gradient, and what it keeps for it."""

import pytest
import torch

from foundling.config.model import ModelConfig
from foundling.model import mlp
from foundling.model.kernels.attention_backends import TORCH
from foundling.model.mlp import _Relu2Mlp, relu2_backward_matmul, relu2_matmul, squared_relu
from foundling.model.transformer import Transformer


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


def drawn_feed() -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((37, 24), (80, 24), (24, 80))
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def test_a_feed_forward_in_one_has_the_gradients_of_its_parts() -> None:
    results = []
    for one in (True, False):
        parts = [part.requires_grad_() for part in drawn_feed()]
        if one:
            out = _Relu2Mlp.apply(*parts)
        else:
            out = (parts[0] @ parts[1].t()).relu().square() @ parts[2].t()
        grad = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
        results.append([out.detach(), *torch.autograd.grad(out, parts, grad)])
    for ours, right in zip(*results, strict=True):
        torch.testing.assert_close(ours, right)


def test_its_kernels_tell_the_compiler_the_truth() -> None:
    x, up, down = drawn_feed()
    squares = relu2_matmul(x, up)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(relu2_matmul, (x, up), test_utils=checks)
    torch.library.opcheck(relu2_backward_matmul, (x, down, squares), test_utils=checks)


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_models_feed_forward_is_fused_where_it_can_be(
    is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is asked for, in bf16, with gradients and plain products; else it is as it was."""
    asked: list[torch.Tensor] = []

    def fused(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        asked.append(x)
        return x

    # Nothing is multiplied: a CPU's product in bf16 ends the process in some virtual machines.
    monkeypatch.setattr(mlp, "relu2_mlp", fused)
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: x)
    config = ModelConfig(vocab_size=64, dim=32, layers=1, heads=2, ffn_dim=64, activation="relu2")
    model = Transformer(config)
    model.use_kernels(TORCH, TORCH, fused_mlp=is_fused)
    feed = model.layers[0].ffn

    def is_used(x: torch.Tensor) -> bool:
        asked.clear()
        feed(x)
        return bool(asked)

    x = torch.randn(2, 8, 32)
    narrow = x.bfloat16()
    assert is_used(narrow) == is_fused
    assert not is_used(x)
    with torch.no_grad():
        assert not is_used(narrow)
    for name in ("up", "down"):
        plain = getattr(feed, name)
        setattr(feed, name, Other(32, 64, bias=False))
        assert not is_used(narrow)
        setattr(feed, name, plain)
    assert is_used(narrow) == is_fused


class Other(torch.nn.Linear):
    """As float8 exchanges them."""
