"""Logits of float8 numbers: what is rounded, what is not, and where it is asked for."""

from typing import get_args

import pytest
import torch
from torch import Tensor

from foundling.config.model import ModelConfig
from foundling.config.parallel import ParallelConfig
from foundling.config.train import TrainConfig
from foundling.model.initialization import init_weights
from foundling.model.loss import (
    IGNORE,
    MOST,
    Float8Matrix,
    Kind,
    cross_entropy_sum,
    float8_matmul,
    to_float8,
)
from foundling.model.transformer import Transformer
from foundling.parallel.apply import apply_parallel
from foundling.parallel.mesh import ALONE

KINDS: tuple[Kind, ...] = get_args(Kind)


def given(rows: int = 40, width: int = 32, vocab: int = 96) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, width, generator=generator)
    head = torch.randn(vocab, width, generator=generator) * width**-0.5
    targets = torch.randint(vocab, (rows,), generator=generator)
    targets[::7] = IGNORE
    return hidden, head, targets


def wide(part: Float8Matrix) -> Tensor:
    return part.numbers.float() * part.scale


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_is_rounded_once_to_four_digits(kind: Kind) -> None:
    for size in (1e-9, 1.0, 1e9):
        matrix = (given()[0] * size).bfloat16()
        part = to_float8(matrix, kind)
        assert part.numbers.dtype == torch.float8_e4m3fn
        assert part.numbers.float().abs().max() <= MOST
        assert part.numbers.float().abs().max() > MOST / 4, "as large as fits"
        assert torch.equal(torch.frexp(part.scale)[0], torch.full_like(part.scale, 0.5))
        # A half of the last of three digits, or of the smallest step that there is.
        step = matrix.float().abs() / 16 + part.scale * 2**-9
        assert bool(((wide(part) - matrix.float()).abs() <= step).all())


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros_and_a_row_has_its_own_scale(kind: Kind) -> None:
    matrix = torch.stack([torch.zeros(32), torch.full((32,), 1e-6), torch.full((32,), 100.0)])
    part = to_float8(matrix.bfloat16(), kind)
    assert bool((wide(part)[0] == 0).all())
    assert part.scale.shape == ((3, 1) if kind == "rowwise" else ())
    is_kept = bool(((wide(part)[1] - 1e-6).abs() < 1e-7).all())
    assert is_kept == (kind == "rowwise"), "beside 100 and with one scale it is nothing"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_the_loss_is_near_and_its_gradient_is_of_those_logits(kind: Kind, softcap: float) -> None:
    hidden, head, targets = (part.requires_grad_(part.is_floating_point()) for part in given())
    exact, _ = cross_entropy_sum(hidden, head, targets, softcap, 1e-3)
    total, count = cross_entropy_sum(hidden, head, targets, softcap, 1e-3, kind)
    assert int(count) == int((targets != IGNORE).sum())
    assert total.item() != exact.item()
    assert total.item() == pytest.approx(exact.item(), rel=0.02)
    found = torch.autograd.grad(total, (hidden, head))
    # By hand: softmax of the narrow logits less one at the target, through the unrounded head.
    logits = float8_matmul(hidden, to_float8(head, kind)).detach().requires_grad_()
    bent = softcap * torch.tanh(logits / softcap) if softcap else logits
    keep = targets != IGNORE
    z = bent.logsumexp(-1)
    losses = z - bent.gather(1, targets.clamp(min=0)[:, None])[:, 0] + 1e-3 * z.square()
    (of_logits,) = torch.autograd.grad((losses * keep).sum(), logits)
    for part, wanted in zip(found, (of_logits @ head, of_logits.t() @ hidden), strict=True):
        assert torch.allclose(part, wanted, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        scored, _ = cross_entropy_sum(hidden, head, targets, softcap, 1e-3, kind)
    assert scored.item() == pytest.approx(exact.item(), rel=1e-5), "evaluation is exact"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("asked", [False, True])
def test_a_run_that_asks_for_it_has_it(asked: bool) -> None:
    pytest.importorskip("torchao")
    sizes = {"vocab_size": 64, "dim": 32, "layers": 1, "heads": 2, "ffn_dim": 64}
    model = Transformer(ModelConfig(**sizes, tie_embeddings=True))  # type: ignore[arg-type]
    init_weights(model, 1)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    train = TrainConfig(compile="off", float8="tensorwise", float8_skip=() if asked else ("head",))
    module = apply_parallel(model, ParallelConfig(), ALONE, train)
    total, _ = module(tokens, tokens, None)
    assert model.head_float8 == ("tensorwise" if asked else None)
    model.head_float8 = None
    same = module(tokens, tokens, None)[0].item() == total.item()
    assert same != asked
