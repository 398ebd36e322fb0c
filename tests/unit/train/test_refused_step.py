"""A step is judged before the optimizer sees it: one that is refused changes nothing."""

import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foundling.config.model import ModelConfig
from foundling.config.optim import OptimConfig
from foundling.config.parallel import ParallelConfig
from foundling.config.run import GuardConfig, RunConfig
from foundling.data.batch import Batch, Bounds, Counts
from foundling.data.batch_reader import BatchReader
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer
from foundling.optim.optimizer import build_optimizer
from foundling.parallel.apply import apply_parallel
from foundling.parallel.mesh import ALONE
from foundling.runtime.dist import World
from foundling.runtime.run_dir import RunDir, read_lines
from foundling.runtime.run_reader import read_events
from foundling.train import step
from foundling.train.faults.anomaly import AnomalyGuard, RefusedStepError
from foundling.train.loop import train
from foundling.train.state import GradScaler, TrainState, named_tensors
from foundling.train.step import StepOptions, train_step

pytestmark = pytest.mark.usefixtures("short_window")

MODEL = ModelConfig(vocab_size=64, dim=32, layers=2, heads=2, ffn_dim=64)
OPTIMIZERS = {
    "adamw": OptimConfig(),
    "adamw8bit": OptimConfig(name="adamw8bit"),
    "muon": OptimConfig(name="muon"),
    "muon, plain decay": OptimConfig(name="muon", cautious_decay=False, weight_decay=0.1),
}


def make_state(optim: OptimConfig) -> TrainState:
    model = Transformer(MODEL)
    init_weights(model, 1)
    optimizer = build_optimizer(model.named_parameters(), optim)
    module = apply_parallel(model, ParallelConfig(), ALONE)
    cpu = torch.device("cpu")
    return TrainState(model, module, optimizer, World(), cpu, torch.float32, seed=1)


def batch(number: int) -> Batch:
    tokens = np.random.default_rng(number).integers(0, 64, (4, 17))
    counts = Counts(64, 64, 64)
    bounds = Bounds.of(np.zeros((4, 16), np.int32))
    return Batch(tokens[:, :-1], tokens[:, 1:].copy(), bounds, counts, {"a": counts}, {"a": 4})


def everything(state: TrainState) -> dict[str, torch.Tensor]:
    """Weights, moments and counts, copied."""
    found = {k: v.clone() for k, v in named_tensors(state.params(), state.optimizer).items()}
    for name, param in state.params():
        if "step" in state.optimizer.state[param]:
            found[f"{name}.count"] = state.optimizer.state[param]["step"].clone()
    return found


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def steps(state: TrainState, numbers: list[int], **how: Any) -> None:
    for number in numbers:
        train_step(state, [batch(number)], StepOptions(lr=1e-2, clip=1.0, sources=["a"]), **how)


@pytest.mark.parametrize("factor", [math.nan, math.inf])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_not_finite_changes_nothing(
    name: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, calm = make_state(OPTIMIZERS[name]), make_state(OPTIMIZERS[name])
    guard = AnomalyGuard(GuardConfig())
    steps(state, [0], guard=guard)
    before, counted = everything(state), (state.step, state.ledger)
    with monkeypatch.context() as patch:
        multiply(patch, factor)
        with pytest.raises(RefusedStepError) as refused:
            steps(state, [1], guard=guard)
    assert refused.value.refused.step == 1
    assert (state.step, state.ledger) == counted
    assert_equal(everything(state), before)
    state.optimizer.zero_grad(set_to_none=True)  # as rollback.handle_refused_step does
    steps(state, [3, 4], guard=guard)
    steps(calm, [0, 3, 4])
    assert_equal(everything(state), everything(calm))


def multiply(patch: pytest.MonkeyPatch, factor: float) -> None:
    real: Callable[..., torch.Tensor] = step._accumulate

    def multiplied(state: TrainState, *rest: Any) -> torch.Tensor:
        total = real(state, *rest)
        scale_gradients(state, factor)
        return total

    patch.setattr(step, "_accumulate", multiplied)


def scale_gradients(state: TrainState, factor: float) -> None:
    for _, param in state.params():
        assert param.grad is not None
        param.grad *= factor


def test_seconds_are_those_of_the_step(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the end of what came after the step before: waiting for a batch is part of it."""
    real = BatchReader.step

    def slow(self: BatchReader, number: int) -> list[Batch]:
        time.sleep(0.1)
        return real(self, number)

    monkeypatch.setattr(BatchReader, "step", slow)
    config = tiny.replace(train={"horizon": 12}, eval={"every": 0}, checkpoint={"every": 5})
    run, began = RunDir(tmp_path / "run"), time.perf_counter()
    train(config, run)
    lines = read_lines(run.metrics_path)
    # A batch may have come while the step before it took its time; all others were waited for.
    told = [(line["step_s"], line["data_wait_s"]) for line in lines]
    assert all(step_s > 0.05 or wait_s < 0.05 for step_s, wait_s in told), told
    assert sum(wait_s > 0.05 for _, wait_s in told) > 2, told
    assert sum(line["step_s"] for line in lines) < time.perf_counter() - began
    assert all(line["data_wait_s"] <= line["step_s"] for line in lines)


def easily_shocked(tiny: RunConfig) -> RunConfig:
    """Twenty steps, saved after 8 and 16; two steps in a row that are not finite send it back."""
    return tiny.replace(
        train={"horizon": 20},
        checkpoint={"every": 8, "background": False},
        eval={"every": 0},
        log={"every": 99},
        guard={"spike_norm": 8, "nonfinite": 2},
    )


def spoil(
    patch: pytest.MonkeyPatch, factors: dict[int, list[float]], checkpoint: Path | None = None
) -> None:
    """Multiply gradients of steps, each time that they are taken, and remove a checkpoint then."""
    real: Callable[..., torch.Tensor] = step._accumulate

    def spoilt(state: TrainState, *rest: Any) -> torch.Tensor:
        total = real(state, *rest)
        if factors.get(state.step):
            if checkpoint is not None:
                shutil.rmtree(checkpoint, ignore_errors=True)
            scale_gradients(state, factors[state.step].pop(0))
        return total

    patch.setattr(step, "_accumulate", spoilt)


def test_a_spike_without_a_whole_checkpoint_is_left_out(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its update was not taken, so there is nothing to go back for."""
    factors = {12: [math.nan, math.nan], 14: [1e4]}
    spoil(monkeypatch, factors, tmp_path / "run" / "checkpoints" / "step-00000008")
    run = RunDir(tmp_path / "run")
    train(easily_shocked(tiny), run)
    assert not any(factors.values())
    told = read_events(run).record
    assert [(one["what"], one["back_to"]) for one in told] == [
        ("nonfinite", None),
        ("nonfinite", None),
        ("spike", None),
    ]
    assert run.read_info()["status"] == "finished"


def test_a_gradient_that_is_nan_at_every_scale_leaves_the_scale_as_it_was() -> None:
    """The replay of a killed run leaves the batch out without having halved anything."""
    state = make_state(OPTIMIZERS["adamw"])
    state.grad_scaler = GradScaler(held=5)
    state.model.norm.weight.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(RefusedStepError):
        steps(state, [0], guard=AnomalyGuard(GuardConfig()))
    assert state.grad_scaler == GradScaler(held=5)
