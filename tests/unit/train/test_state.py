"""fp16's scale of the loss: a step that overflows is taken again, and nothing is lost."""

from dataclasses import asdict

import pytest
import torch

from foundling.train.state import INITIAL_SCALE, MAX_SCALE, MIN_SCALE, GradScaler
from foundling.train.step import StepOptions, train_step
from tests.unit.train.test_step import make_batch, make_state


def test_it_halves_at_once_and_doubles_in_time() -> None:
    scale = GradScaler(patience=3)
    assert scale.back_off()
    assert scale.value == INITIAL_SCALE / 2
    for _ in range(3):
        scale.grow_if_stable()
    assert (scale.value, scale.held) == (INITIAL_SCALE, 0)
    assert GradScaler(**asdict(scale)) == scale
    assert not GradScaler(value=MIN_SCALE).back_off()
    full = GradScaler(value=MAX_SCALE, patience=1)
    full.grow_if_stable()
    assert full.value == MAX_SCALE


def test_a_step_that_overflows_is_taken_again_from_the_same_batch() -> None:
    plain, scaled = make_state(), make_state()
    scaled.grad_scaler = GradScaler(value=2.0**140)  # overflows fp32 for a while
    results = [
        train_step(state, [make_batch(range(8))], StepOptions(lr=1e-3, clip=1.0, sources=["a"]))
        for state in (plain, scaled)
    ]
    assert scaled.grad_scaler.value < 2.0**140
    assert scaled.grad_scaler.held == 1
    assert results[0].loss == results[1].loss
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-5)
    for (_, a), (_, b) in zip(plain.params(), scaled.params(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
