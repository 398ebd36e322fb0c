"""Tables' gradients: added up by autograd, or where they lie."""

import pytest
import torch
import torch.nn.functional as F

from foundling.model.layers import _Rows


@pytest.mark.parametrize("in_place", [False, True])
def test_micro_batches_add_up(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    table = torch.randn(11, 6, requires_grad=True)
    other = table.detach().clone().requires_grad_()
    tables, zeros = [], torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: tables.append(a) or zeros(*a, **k))
    for _ in range(3):
        tokens, grad = torch.randint(11, (2, 9)), torch.randn(2, 9, 6)
        held = table.grad
        _Rows.apply(table, tokens, torch.float32, in_place).backward(grad)
        assert held is None or table.grad is held
        F.embedding(tokens, other).backward(grad)
    assert table.grad is not None
    assert len(tables) == (1 if in_place else 3), "only the first one needs a table of its own"
    torch.testing.assert_close(table.grad, other.grad)


def test_a_table_that_is_the_head_too() -> None:
    """Gradients that autograd adds and those that are added by hand meet in one tensor."""
    torch.manual_seed(0)
    table = torch.randn(11, 6, requires_grad=True)
    other = table.detach().clone().requires_grad_()
    for _ in range(3):
        tokens = torch.randint(11, (2, 9))
        (_Rows.apply(table, tokens, torch.float32, True) @ table.t()).square().sum().backward()
        (F.embedding(tokens, other) @ other.t()).square().sum().backward()
    torch.testing.assert_close(table.grad, other.grad, rtol=1e-5, atol=1e-4)
