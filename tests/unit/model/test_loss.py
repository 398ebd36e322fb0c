"""The chunked loss is the plain one, with its gradients, at any chunk size and any mask."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foundling.config.model import ModelConfig
from foundling.model import loss
from foundling.model.initialization import init_weights
from foundling.model.loss import IGNORE, cross_entropy_sum
from foundling.model.transformer import Transformer

CASE = tuple[Tensor, Tensor, Tensor]


def case(rows: int, vocab: int, dim: int, ignored: float, seed: int) -> CASE:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, dim, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(vocab, dim, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(vocab, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < ignored] = IGNORE
    return hidden, head, targets


def plain(hidden: Tensor, head: Tensor, targets: Tensor, softcap: float = 0.0) -> Tensor:
    logits = hidden @ head.t()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    vocab=st.integers(2, 30),
    chunk=st.integers(1, 300),
    ignored=st.sampled_from([0.0, 0.4, 1.0]),
    seed=st.integers(0, 1000),
    softcap=st.sampled_from([0.0, 0.7, 15.0]),
)
def test_value_and_gradients_equal_the_plain_version(
    rows: int, vocab: int, chunk: int, ignored: float, seed: int, softcap: float
) -> None:
    hidden, head, targets = case(rows, vocab, 5, ignored, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "CHUNK_LOGITS", chunk)
        total, count = cross_entropy_sum(hidden, head, targets, softcap)
        got = torch.autograd.grad(total / 7, (hidden, head))
        with torch.no_grad():
            evaluated, _ = cross_entropy_sum(hidden, head, targets, softcap)
    reference = plain(hidden, head, targets, softcap)
    expected = torch.autograd.grad(reference / 7, (hidden, head))
    assert int(count) == int((targets != IGNORE).sum())
    assert torch.allclose(total, reference, rtol=1e-12, atol=1e-12)
    assert torch.allclose(evaluated, reference, rtol=1e-12, atol=1e-12)
    assert all(
        torch.allclose(a, b, rtol=1e-11, atol=1e-12) for a, b in zip(got, expected, strict=True)
    )


@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("vocab", [77, 128])
def test_an_odd_vocabulary_is_filled_up(
    monkeypatch: pytest.MonkeyPatch, vocab: int, softcap: float
) -> None:
    """As on a GPU, where the head is copied into the products' precision; GPT-2's has 50,257."""
    monkeypatch.setattr(loss, "ALIGNED_ON", ("cpu",))
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 300)
    hidden, wide, targets = case(9, vocab, 5, 0.3, seed=4)
    head = wide.detach().float().requires_grad_()
    assert len(loss._filled_up(head.detach(), torch.float64)) == 128
    total, _ = cross_entropy_sum(hidden, head, targets, softcap, 0.01)
    got = torch.autograd.grad(total / 7, (hidden, head))
    with torch.no_grad():
        evaluated, _ = cross_entropy_sum(hidden, head, targets, softcap, 0.01)
    monkeypatch.setattr(loss, "ALIGNED_ON", ())
    expected, _ = cross_entropy_sum(hidden, head, targets, softcap, 0.01)
    wanted = torch.autograd.grad(expected / 7, (hidden, head))
    assert torch.allclose(total, expected, rtol=1e-12)
    assert torch.allclose(evaluated, expected, rtol=1e-12)
    for found, right in zip(got, wanted, strict=True):
        assert found.shape == right.shape
        assert torch.allclose(found, right, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_the_gradient_is_the_slope_of_the_loss(softcap: float) -> None:
    hidden, head, targets = case(6, 7, 3, 0.3, seed=4)

    def value(h: Tensor, w: Tensor) -> Tensor:
        return cross_entropy_sum(h, w, targets, softcap)[0]

    assert torch.autograd.gradcheck(value, (hidden, head))


def test_only_what_needs_a_gradient_gets_one() -> None:
    hidden, head, targets = case(6, 7, 3, 0.0, seed=4)
    torch.autograd.backward(cross_entropy_sum(hidden.detach(), head, targets)[0])
    assert head.grad is not None
    assert hidden.grad is None


def test_under_autocast_the_sum_stays_wide_and_the_head_gradient_too() -> None:
    hidden, head, targets = (
        t.float() if t.is_floating_point() else t for t in case(64, 9, 8, 0, 1)
    )
    hidden, head = hidden.detach().requires_grad_(), head.detach().requires_grad_()
    with torch.autocast("cpu", torch.float16):
        total, _ = cross_entropy_sum(hidden, head, targets)
    torch.autograd.backward(total)
    assert total.dtype == torch.float32
    assert head.grad is not None
    assert head.grad.dtype == torch.float32
    assert float(total.detach()) == pytest.approx(
        float(plain(hidden, head, targets).detach()), rel=2e-3
    )


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_loss_is_the_loss_of_its_logits(tied: bool) -> None:
    config = ModelConfig(vocab_size=31, dim=16, layers=2, heads=2, ffn_dim=24, tie_embeddings=tied)
    model = Transformer(config)
    init_weights(model, 1)
    model.double()
    tokens = torch.randint(31, (3, 9), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1, 1)
    targets[:, -1] = IGNORE
    total, count = model.loss(tokens, targets)
    got = torch.autograd.grad(total, list(model.parameters()))
    logits = model(tokens)
    reference = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    expected = torch.autograd.grad(reference, list(model.parameters()))
    assert int(count) == 24
    assert torch.allclose(total, reference, rtol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(got, expected, strict=True))


def test_a_fully_masked_batch_is_zero_with_zero_gradients() -> None:
    model = Transformer(ModelConfig(vocab_size=31, dim=16, layers=1, heads=2, ffn_dim=24))
    init_weights(model, 1)
    tokens = torch.zeros(2, 5, dtype=torch.long)
    total, count = model.loss(tokens, torch.full((2, 5), IGNORE), torch.full((2, 5), -1))
    torch.autograd.backward(total)
    assert (float(total.detach()), int(count)) == (0.0, 0)
    assert total.dtype == torch.float32
    assert count.dtype == torch.int64
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
