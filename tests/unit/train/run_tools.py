"""What tests of whole runs share: killing one in a step, and what "the same run" means."""

from typing import Any

import pytest
import torch

from foundling.checkpoint.bundle import load_bundle
from foundling.config.run import RunConfig
from foundling.runtime.run_dir import RunDir, read_lines
from foundling.runtime.run_reader import step_lines
from foundling.train import loop, step
from foundling.train.loop import train

EXACT = ("step", "loss", "lr", "grad_norm", "update_ratio", "tokens", "targets", "sources")


class Killed(BaseException):
    """Stands for kill -9 inside one process: nothing of ours may catch it."""


def die_at(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Raise in the middle of the given step, after its update and before its line."""
    real = step.train_step

    def deadly(state: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(state, *args, **kwargs)
        if state.step == steps:
            raise Killed
        return result

    monkeypatch.setattr(loop, "train_step", deadly)


def train_until(
    config: RunConfig, run: RunDir, steps: int, monkeypatch: pytest.MonkeyPatch
) -> RunDir:
    """Train a run that dies in a step."""
    with monkeypatch.context() as patch:
        die_at(patch, steps)
        with pytest.raises(Killed):
            train(config, run)
    return run


def columns(run: RunDir) -> list[list[Any]]:
    """What every step must have in common."""
    return [[line[name] for name in EXACT] for line in read_lines(run.metrics_path)]


def weights(run: RunDir) -> dict[str, torch.Tensor]:
    """The newest checkpoint's."""
    return load_bundle(run.path).model.state_dict()


def assert_same(one: RunDir, other: RunDir) -> None:
    """Raise unless the two runs did the same thing, bit for bit."""
    assert columns(one) == columns(other)
    read = [[(x["sources"], x.get("skipped")) for x in step_lines(run)] for run in (one, other)]
    assert read[0] == read[1]
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
