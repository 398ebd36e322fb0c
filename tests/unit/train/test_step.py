"""One step: exact accumulation, exact counts, and nothing taken that is not finite."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from foundling.config.errors import RunError
from foundling.config.model import ModelConfig
from foundling.config.optim import OptimConfig
from foundling.config.parallel import ParallelConfig
from foundling.data.batch import IGNORE, Batch, Bounds, Counts
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer
from foundling.optim.optimizer import build_optimizer
from foundling.parallel.apply import apply_parallel
from foundling.parallel.mesh import ALONE
from foundling.runtime.device import bf16_failure
from foundling.runtime.dist import World
from foundling.train.state import TrainState, allocate_gradients
from foundling.train.step import StepOptions, step_seed, train_step

MODEL = ModelConfig(vocab_size=50, dim=16, layers=1, heads=2, ffn_dim=32)


def make_state(optim: OptimConfig | None = None) -> TrainState:
    model = Transformer(MODEL)
    init_weights(model, 1)
    optimizer = build_optimizer(model.named_parameters(), optim or OptimConfig())
    module = apply_parallel(model, ParallelConfig(), ALONE)
    cpu = torch.device("cpu")
    return TrainState(model, module, optimizer, World(), cpu, torch.float32, seed=1)


def make_batch(rows: Sequence[int], masked: float = 0.0) -> Batch:
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, 50, (8, 13))
    hidden = rng.random((8, 12)) < masked
    inputs, targets = tokens[list(rows), :-1], tokens[list(rows), 1:].copy()
    targets[hidden[list(rows)]] = IGNORE
    counts = Counts(inputs.size, inputs.size, int((targets != IGNORE).sum()))
    documents = np.zeros(inputs.shape, np.int32)
    return Batch(inputs, targets, Bounds.of(documents), counts, {"a": counts}, {"a": len(rows)})


def weights_after(batches: list[Batch]) -> tuple[dict[str, torch.Tensor], float, float]:
    state = make_state()
    result = train_step(state, batches, StepOptions(lr=1e-2, clip=1.0, sources=["a"]))
    weights = {name: param.detach() for name, param in state.params()}
    return weights, result.loss, result.grad_norm


@pytest.mark.parametrize("masked", [0.0, 0.5])
def test_accumulation_is_the_same_step(masked: float) -> None:
    whole = weights_after([make_batch(range(8), masked)])
    parts = weights_after([make_batch(rows, masked) for rows in ([0], [1, 2, 3], [4, 5, 6, 7])])
    assert parts[1] == pytest.approx(whole[1], rel=1e-6)
    assert parts[2] == pytest.approx(whole[2], rel=1e-5)
    for name, weight in whole[0].items():
        torch.testing.assert_close(parts[0][name], weight, rtol=1e-4, atol=1e-6)


def test_held_gradients_are_added_to_and_never_replaced() -> None:
    """What comes out of a CUDA graph lies in memory that its next launch overwrites."""
    plain, held = make_state(), make_state()
    allocate_gradients(held)
    places = {
        name: param.grad.data_ptr() for name, param in held.params() if param.grad is not None
    }
    assert len(places) == len(dict(held.params()))
    for state in (plain, held):
        for micro in ([0, 1], [2, 3]):
            batch = make_batch(micro)
            rows = torch.as_tensor(batch.inputs), torch.as_tensor(batch.targets)
            state.module(*rows, None)[0].backward()
    for (name, one), (_, other) in zip(plain.params(), held.params(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert other.grad.data_ptr() == places[name]
        torch.testing.assert_close(other.grad, one.grad)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_looks_at_the_device_once_and_once_more_where_updates_are_measured(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    for name in ("item", "tolist", "__float__", "__bool__", "__int__"):
        real = getattr(torch.Tensor, name)

        def watched(self: torch.Tensor, *args: object, real: Any = real, name: str = name) -> Any:
            looks.append((name, tuple(self.shape)))
            return real(self, *args)

        monkeypatch.setattr(torch.Tensor, name, watched)
    state, batches = make_state(OptimConfig(name=optimizer)), [make_batch([0, 1]), make_batch([2])]
    on_the_host = [("tolist", (3, 4))]  # what the step eats
    train_step(state, batches, StepOptions(lr=1e-3, clip=1.0, sources=["a"]))
    assert looks == [*on_the_host, ("tolist", (2,))]
    looks.clear()
    train_step(state, batches, StepOptions(lr=1e-3, clip=1.0, sources=["a"], measure_update=True))
    groups = len(state.optimizer.param_groups)
    assert looks == [*on_the_host, ("tolist", (2,)), ("tolist", (2 * groups + 1,))]


def test_bf16_on_a_cpu_trains_as_fp32_does() -> None:
    if death := bf16_failure():
        pytest.skip(f"a child process that computes in bf16 {death}")
    plain, narrow = make_state(), make_state()
    narrow.dtype = torch.bfloat16
    for _ in range(3):
        results = [
            train_step(state, [make_batch(range(8))], StepOptions(lr=1e-2, clip=1.0, sources=["a"]))
            for state in (plain, narrow)
        ]
        assert results[0].loss != results[1].loss
        assert results[1].loss == pytest.approx(results[0].loss, rel=1e-2)
        assert results[1].grad_norm == pytest.approx(results[0].grad_norm, rel=5e-2)
    assert all(param.dtype == torch.float32 for _, param in narrow.params())


def test_a_fully_masked_micro_batch_changes_nothing() -> None:
    alone = weights_after([make_batch(range(8))])
    beside = weights_after([make_batch(range(8)), make_batch([0, 1], masked=1.0)])
    assert beside[1] == alone[1]
    for name, weight in alone[0].items():
        assert torch.equal(beside[0][name], weight)


def test_the_loss_is_the_mean_over_counted_targets() -> None:
    state, batch = make_state(), make_batch(range(8), masked=0.3)
    logits = state.model(torch.as_tensor(batch.inputs))
    wanted = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.as_tensor(batch.targets).flatten(), ignore_index=IGNORE
    )
    result = train_step(state, [batch], StepOptions(lr=1e-2, clip=1.0, sources=["a"]))
    assert result.loss == pytest.approx(wanted.item(), rel=1e-5)
    assert result.counts.total.targets == batch.counts.targets


def test_the_ledger_grows_by_what_was_read() -> None:
    state = make_state()
    for _ in range(3):
        train_step(
            state,
            [make_batch([0, 1]), make_batch([2])],
            StepOptions(lr=1e-3, clip=1.0, sources=["a"]),
        )
    total = state.ledger.total
    assert state.step == 3
    assert (total.units, total.positions, total.tokens) == (9, 9 * 12, 9 * 12)


def test_a_step_that_is_not_finite_is_not_taken() -> None:
    state = make_state()
    with torch.no_grad():
        state.model.norm.weight.fill_(math.inf)
    before = {name: param.detach().clone() for name, param in state.params()}
    with pytest.raises(RunError, match="step 1 has loss nan"):
        train_step(state, [make_batch([0])], StepOptions(lr=1e-2, clip=1.0, sources=["a"]))
    assert state.step == 0
    assert not any(state.optimizer.state.values())
    for name, param in state.params():
        assert torch.equal(param, before[name]), name


def test_ratios_are_measured_when_asked() -> None:
    state = make_state()
    result = train_step(
        state,
        [make_batch(range(8))],
        StepOptions(lr=1e-2, clip=1.0, sources=["a"], measure_update=True),
    )
    assert 0 < result.update_ratios["all"] < 1
    assert set(result.group_grad_norms) == {
        group["group"] for group in state.optimizer.param_groups
    }


def test_randomness_is_keyed_by_seed_step_and_rank() -> None:
    seeds = {step_seed(s, t, r) for s in range(3) for t in range(3) for r in range(3)}
    assert len(seeds) == 27
    assert step_seed(1, 2, 3) == step_seed(1, 2, 3)
    assert all(0 <= seed < 2**63 for seed in seeds)
