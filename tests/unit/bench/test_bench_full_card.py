"""Benches on a card that is too small: sizes are passed over, and one sentence says what fits."""

from typing import Any

import pytest
import torch

from foundling.bench import train
from foundling.bench.train import BenchOptions, bench_train
from foundling.config.errors import RunError
from foundling.config.run import RunConfig
from foundling.profiling.step_runner import RandomRows, StepRunner
from foundling.runtime.device import choose_device

SEARCH = BenchOptions(best=True, steps=1, check_steps=0)


def test_moments_that_never_fit_end_in_a_sentence(small: RunConfig, no_moments: list[int]) -> None:
    told: list[str] = []
    with pytest.raises(RunError, match="not even one row fits"):
        bench_train(small, SEARCH, told.append)
    assert [line for line in told if "do not fit" in line] == [
        f"{rows} rows do not fit" for rows in (8, 4, 2, 1)
    ]


def test_moments_that_fit_the_second_time_are_made_whole(
    small: RunConfig, no_moments: list[int]
) -> None:
    no_moments[0] = 1
    runner = StepRunner(small, choose_device("cpu", "fp32"))
    rows = RandomRows(300, 32, 1)
    with pytest.raises(torch.OutOfMemoryError):
        runner.timed(rows, 1, size=4)
    runner.recover()
    assert runner.timed(rows, 1, size=4).losses
    kept = runner.state.optimizer.state.values()
    assert all({"step", "exp_avg", "exp_avg_sq"} <= state.keys() for state in kept)


def test_weights_that_do_not_fit_end_in_a_sentence(
    small: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(train, "StepRunner", full)
    with pytest.raises(RunError, match="not even one row fits"):
        bench_train(small, SEARCH)
    with pytest.raises(RunError, match="a step of 4 rows"):
        bench_train(small, BenchOptions(steps=1, check_steps=0))
