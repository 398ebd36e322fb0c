"""Runs with faults, clocks and kills drawn at random: killed and taken up, each is the run that was
left alone, line by line and bit by bit."""

import contextlib
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_tools import Killed, assert_same, die_at
from test_anomaly_runs import events, interventions, plant

from foundling.checkpoint.folders import list_checkpoints
from foundling.config.run import RunConfig
from foundling.runtime.exits import EndOfRun
from foundling.runtime.run_dir import RunDir
from foundling.train.loop import train

pytestmark = pytest.mark.usefixtures("short_window")

SEEDS = (0, 1, 2, 3, 8, 14, 30, 33)
"""The last four found something."""


def drawn(config: RunConfig, dice: random.Random) -> RunConfig:
    """Clocks that meet in every way."""
    guard = config.guard.replace(
        limit=8,
        spike_loss=8,
        spike_norm=8,
        nonfinite=dice.choice([1, 2, 3]),
        hash_every=dice.choice([0, 4, 10]),
    )
    every, behind = dice.choice([3, 5, 8]), dice.choice([True, False])
    return config.replace(
        train={"horizon": dice.choice([20, 36])},
        optim={"name": dice.choice(["adamw", "muon"])},
        eval={"every": dice.choice([5, 7, 50])},
        checkpoint={"every": every, "background": behind, "keep": 3},
        log={"every": dice.choice([1, 2, 4, 99])},
        guard=guard,
    )


def faults_of(dice: random.Random, steps: int) -> dict[int, float]:
    """Batches, alone and in a row, and what their gradients are multiplied with."""
    found = {}
    for _ in range(dice.randint(1, 4)):
        first, factor = dice.randrange(steps + 2), dice.choice([math.nan, math.inf, 60.0, 1e4])
        found |= dict.fromkeys(range(first, first + dice.choice([1, 1, 2, 3])), factor)
    return found


def ended(config: RunConfig, run: RunDir) -> Any:
    """How it came to its end: None, or the guard's code."""
    try:
        train(config, run)
    except EndOfRun as end:
        return end.code
    return None


@contextlib.contextmanager
def killed_in(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch, contextlib.suppress(Killed, EndOfRun):
        die_at(patch, step)
        yield


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_and_taken_up_it_is_the_same_run(
    seed: int, tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(seed)
    config = drawn(tiny, dice)
    steps = int(config.train.horizon_in("steps"))
    plant(monkeypatch, faults_of(dice, steps))
    whole, killed = (RunDir(tmp_path / name) for name in ("whole", "killed"))
    end = ended(config, whole)
    for step in sorted(dice.sample(range(1, steps), dice.randint(1, 3))):
        with killed_in(step, monkeypatch):
            train(config, killed)
            break  # nothing was left to kill
    else:
        assert ended(config, killed) == end
    assert interventions(whole) == interventions(killed)
    told = [[{**line, "at": 0, "time": 0} for line in events(run)] for run in (whole, killed)]
    assert told[0] == told[1]
    if list_checkpoints(whole.checkpoints):
        assert_same(whole, killed)
