"""Benches on a card that is too small: sizes are passed over, and one sentence says what fits."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from foundling.bench import steps, train
from foundling.bench.ladder import bench_ladder
from foundling.bench.ladder_rung import climb
from foundling.bench.rows import RandomRows
from foundling.bench.steps import Runner
from foundling.bench.train import Asked, bench_train
from foundling.config import RunConfig
from foundling.config.errors import RunError
from foundling.runtime.children import Ended
from foundling.runtime.device import choose

SEARCH = Asked(best=True, steps=1, check_steps=0)


@pytest.fixture
def no_moments(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """AdamW's moments do not fit as often as the list's one number says."""
    left, right = [10**9], torch.zeros_like

    def zeros_like(given: torch.Tensor, **how: Any) -> torch.Tensor:
        # AdamW alone asks for a memory format; its first moment is made after its count of steps.
        if left[0] and "memory_format" in how and given.numel() > 1000:
            left[0] -= 1
            raise torch.OutOfMemoryError("no room")
        return right(given, **how)

    monkeypatch.setattr(torch, "zeros_like", zeros_like)
    return left


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
    runner = Runner(small, choose("cpu", "fp32"))
    rows = RandomRows(300, 32, 1)
    with pytest.raises(torch.OutOfMemoryError):
        runner.timed(rows, 1, size=4)
    runner.recover()
    assert runner.timed(rows, 1, size=4).losses
    kept = runner.state.optimizer.state.values()
    assert all({"step", "exp_avg", "exp_avg_sq"} <= state.keys() for state in kept)


def test_a_rung_whose_moments_never_fit_says_so(small: RunConfig, no_moments: list[int]) -> None:
    runner = Runner(small, choose("cpu", "fp32"))
    found = climb(runner, {"batch": 3, "most": 4, "steps": 1})
    assert found == {"same": None, "largest": None}
    answer = json.dumps({**found, "chosen": [], "dtype": "float32"})
    (rung,) = bench_ladder(
        small,
        steps=1,
        most=4,
        memory_gb=0,
        limit_s=9,
        only=(1,),
        start=lambda _: Ended(0, answer, "", 1.0),
    )
    assert "not even one row fits" in rung.refusal


def test_weights_that_do_not_fit_end_in_a_sentence(
    small: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(train, "Runner", full)
    with pytest.raises(RunError, match="not even one row fits"):
        bench_train(small, SEARCH)
    with pytest.raises(RunError, match="a step of 4 rows"):
        bench_train(small, Asked(steps=1, check_steps=0))


class Full:
    """A contender that fits nowhere."""

    how = "somehow"

    def __init__(self, name: str, *_: Any) -> None:
        if name == "hf-bf16":
            raise torch.OutOfMemoryError("no room for the weights")

    def timed(self, *_: Any, size: int, **__: Any) -> None:
        if size < 1:
            raise ValueError("need at least one array to stack")
        raise torch.OutOfMemoryError("no room")

    def recover(self) -> None:
        """Nothing is left."""


@pytest.mark.parametrize("name", ["hf", "hf-plain", "hf-bf16"])
@pytest.mark.parametrize("best", [True, False])
def test_a_contender_that_fits_nowhere_ends_in_a_sentence(
    small: RunConfig, monkeypatch: pytest.MonkeyPatch, name: str, best: bool
) -> None:
    monkeypatch.setattr(train, "Contender", Full)
    monkeypatch.setattr(train, "refuse_contender", lambda *_: None)
    asked = replace(SEARCH, best=best, compare=(name,))
    monkeypatch.setattr(
        steps, "best_batch", lambda measure: {rows: measure(rows) for rows in (1, 2)}
    )
    with pytest.raises(RunError, match=f"{name} does not fit at"):
        bench_train(small, asked)
