"""Steps that are judged when the next one has begun: the same run, bit for bit, and what is not
finite changes nothing."""

import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_tools import assert_same

from foundling.config import GuardConfig, ModelConfig, OptimConfig, ParallelConfig, RunConfig
from foundling.data import Batch, Bounds, Counts, Loader
from foundling.model import Transformer, init_weights
from foundling.optim import build_optimizer
from foundling.parallel import ALONE, apply_parallel
from foundling.runtime import RunDir
from foundling.runtime.dist import World
from foundling.runtime.exits import EndOfRun, Exit
from foundling.runtime.pulse import PULSE
from foundling.runtime.rundir import read_lines
from foundling.train import loop
from foundling.train import step as step_module
from foundling.train.guard import Guard, RefusedStepError
from foundling.train.loop import train
from foundling.train.state import TrainState, named_tensors
from foundling.train.step import StepResult, Taken, take_step

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


def steps(state: TrainState, numbers: list[int], **how: Any) -> Iterator[Any]:
    for number in numbers:
        yield take_step(state, [batch(number)], lr=1e-2, clip=1.0, sources=["a"], **how)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_gate_open_is_no_gate(name: str) -> None:
    plain, gated = make_state(OPTIMIZERS[name]), make_state(OPTIMIZERS[name])
    gated.gate()
    wanted = [one.result() for one in steps(plain, [0, 1, 2, 3], measure_update=True)]
    found = list(steps(gated, [0, 1, 2, 3], measure_update=True, later=True))
    assert [one.result() for one in found] == wanted
    assert_equal(everything(gated), everything(plain))


@pytest.mark.parametrize("factor", [math.nan, math.inf])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_not_finite_changes_nothing_and_nothing_after_it_does(
    name: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state(OPTIMIZERS[name])
    state.gate()
    guard = Guard(GuardConfig())
    first = next(steps(state, [0], guard=guard, later=True))
    first.result()
    before, counted = everything(state), (state.step, state.ledger)
    with monkeypatch.context() as patch:
        multiply(patch, factor)
        bad = next(steps(state, [1], guard=guard, later=True))
    behind = next(steps(state, [2], guard=guard, later=True))
    with pytest.raises(RefusedStepError) as refused:
        bad.result()
    with pytest.raises(RefusedStepError):
        bad.result()  # whoever looks again is told the same
    assert not refused.value.was_taken
    assert refused.value.trouble.step == 1
    assert (state.step, state.ledger) == counted
    assert_equal(everything(state), before)
    del behind
    list(steps(state, [3, 4], guard=guard, later=True))
    calm = make_state(OPTIMIZERS[name])
    calm.gate()
    list(steps(calm, [0, 3, 4]))
    assert_equal(everything(state), everything(calm))


def multiply(patch: pytest.MonkeyPatch, factor: float) -> None:
    real: Callable[..., torch.Tensor] = step_module._accumulate

    def multiplied(state: TrainState, *rest: Any) -> torch.Tensor:
        total = real(state, *rest)
        scale_gradients(state, factor)
        return total

    patch.setattr(step_module, "_accumulate", multiplied)


def scale_gradients(state: TrainState, factor: float) -> None:
    for _, param in state.params():
        assert param.grad is not None
        param.grad *= factor


def seen_late(patch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the steps, from 1, that are looked at when the next one has begun."""
    patch.setattr(TrainState, "judge_later", TrainState.gate)
    late: list[int] = []
    real, begun = Taken.result, [0]

    def watched(state: TrainState, *args: Any, **how: Any) -> Taken:
        begun[0] = state.step + 1
        return take_step(state, *args, **how)

    def result(self: Taken) -> StepResult:
        found = real(self)
        late.extend([found.step] * (found.step < begun[0]))
        return found

    patch.setattr(loop, "take_step", watched)
    patch.setattr(Taken, "result", result)
    return late


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_run_is_the_same_run(
    name: str, tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(
        tiny,
        optim=replace(tiny.optim, name=name),
        train=replace(tiny.train, steps=40),
        eval=replace(tiny.eval, every=7, sample_every=0),
        checkpoint=replace(tiny.checkpoint, every=9),
        log=replace(tiny.log, every=1),  # a line may be told when the next step has begun
        guard=replace(tiny.guard, hash_every=10, window=8),
    )
    runs = [RunDir(tmp_path / one) for one in ("at-once", "later")]
    train(config, runs[0])
    with monkeypatch.context() as patch:
        late = seen_late(patch)
        train(config, runs[1])
    assert_same(*runs)
    clocks = {step for every in (7, 9, 10) for step in range(every, 41, every)}
    assert not clocks & set(late)
    assert 1 not in late  # how long it took is told
    assert loop.PROBE_STEPS not in late
    # Before the first checkpoint no spike could be undone: only a short history needs no look.
    assert [step for step in late if step < 9] == [2, 3]
    assert len(late) > 15


def test_seconds_are_those_of_the_step(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of the look at it, which comes a step late, or two at once."""
    real = Loader.step

    def slow(self: Loader, number: int) -> list[Batch]:
        time.sleep(0.1)
        return real(self, number)

    monkeypatch.setattr(Loader, "step", slow)
    late = seen_late(monkeypatch)
    config = replace(
        tiny,
        train=replace(tiny.train, steps=12),
        data=replace(tiny.data, prefetch=0),
        eval=replace(tiny.eval, every=0),
        checkpoint=replace(tiny.checkpoint, every=5),
    )
    run, began = RunDir(tmp_path / "run"), time.perf_counter()
    train(config, run)
    assert len(late) > 5
    lines = read_lines(run.metrics_path)
    # A batch may have come while the step before it took its time; all others were waited for.
    told = [(line["step_s"], line["data_wait_s"]) for line in lines]
    assert all(step_s > 0.05 or wait_s < 0.05 for step_s, wait_s in told), told
    assert sum(wait_s > 0.05 for _, wait_s in told) > 2, told
    assert sum(line["step_s"] for line in lines) < time.perf_counter() - began
    assert all(line["data_wait_s"] <= line["step_s"] for line in lines)


def easily_shocked(tiny: RunConfig) -> RunConfig:
    """Twenty steps, saved after 8 and 16; two steps in a row that are not finite send it back."""
    return replace(
        tiny,
        train=replace(tiny.train, steps=20),
        checkpoint=replace(tiny.checkpoint, every=8, background=False),
        eval=replace(tiny.eval, every=0),
        log=replace(tiny.log, every=99),
        guard=replace(tiny.guard, window=8, spike_norm=8, nonfinite=2),
    )


def spoil(
    patch: pytest.MonkeyPatch, factors: dict[int, list[float]], checkpoint: Path | None = None
) -> None:
    """Multiply gradients of steps, each time that they are taken, and remove a checkpoint then."""
    real: Callable[..., torch.Tensor] = step_module._accumulate

    def spoilt(state: TrainState, *rest: Any) -> torch.Tensor:
        total = real(state, *rest)
        if factors.get(state.step):
            if checkpoint is not None:
                shutil.rmtree(checkpoint, ignore_errors=True)
            scale_gradients(state, factors[state.step].pop(0))
        return total

    patch.setattr(step_module, "_accumulate", spoilt)


def test_who_has_seen_that_no_checkpoint_is_whole_looks_at_every_step(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the next spike is refused, where one that was taken would end the run."""
    config = easily_shocked(tiny)
    late = seen_late(monkeypatch)
    factors = {12: [math.nan, math.nan], 14: [1e4]}
    spoil(monkeypatch, factors, tmp_path / "run" / "checkpoints" / "step-00000008")
    run = RunDir(tmp_path / "run")
    train(config, run)
    assert not any(factors.values())
    told = [line for line in read_lines(run.events_path) if line["event"] == "guard"]
    assert [(one["what"], one["back_to"]) for one in told] == [
        ("nonfinite", None),
        ("nonfinite", None),
        ("spike", None),
    ]
    assert 11 in late
    assert not {13, 14, 15, 16} & set(late)
    assert late[-1] > 16  # there is a checkpoint again


def test_a_batch_that_is_left_out_says_nothing_about_checkpoints(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = seen_late(monkeypatch)
    spoil(monkeypatch, {12: [math.nan]})
    train(easily_shocked(tiny), RunDir(tmp_path / "run"))
    assert {13, 14, 15} <= set(late)


def test_two_steps_that_are_waited_for_are_no_hang(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog counts from what moved last, and a clock's step waits for the one before it."""
    seen_late(monkeypatch)
    log: list[str] = []
    looks, moves = Taken.result, PULSE.move

    def look(self: Taken) -> StepResult:
        log.append("looked")
        return looks(self)

    def move(phase: str, step: int | None = None) -> None:
        log.append("moved")
        moves(phase, step)

    monkeypatch.setattr(Taken, "result", look)
    monkeypatch.setattr(PULSE, "move", move)
    config = replace(
        tiny,
        train=replace(tiny.train, steps=9),
        eval=replace(tiny.eval, every=0),
        checkpoint=replace(tiny.checkpoint, every=3),
    )
    train(config, RunDir(tmp_path / "run"))
    assert log.count("looked") == 9
    assert all(then == "moved" for now, then in pairwise(log) if now == "looked")


def test_a_spike_that_was_taken_needs_a_checkpoint(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was there and is gone when it is wanted."""
    config = easily_shocked(tiny)
    late = seen_late(monkeypatch)
    spoil(monkeypatch, {12: [1e4]}, tmp_path / "run" / "checkpoints" / "step-00000008")
    with pytest.raises(EndOfRun, match=r"its update was taken and no checkpoint") as caught:
        train(config, RunDir(tmp_path / "run"))
    assert caught.value.code == Exit.NONFINITE
    assert 12 in late
