"""What is foreseen, and the sentence when a run does not keep to it."""

from pathlib import Path

import pytest
import torch

from foundling.config.resolve import resolve
from foundling.runtime.dist import World
from foundling.train.foresee import beside_plan, foreseen, known_device, overruns


def test_an_unmeasured_cpu_is_not_guessed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FOUNDLING_HOME", str(tmp_path))
    assert known_device(torch.device("cpu")) is None
    assert foreseen(resolve("hamlet"), torch.device("cpu"), World()) == {}


def test_only_what_is_beyond_the_tolerance_is_told() -> None:
    assert overruns({"step_s": 1.0}, {"step_s": 1.1}) == []
    assert overruns({}, {"step_s": 1.1}) == []
    (told,) = overruns({"step_s": 1.0, "memory_peak": 100}, {"step_s": 1.2, "memory_peak": 90})
    assert "20% slower than planned" in told
    (told,) = overruns({"memory_peak": 100}, {"memory_peak": 150})
    assert "50% larger than planned" in told


def test_what_was_planned_stands_beside_what_it_is() -> None:
    assert beside_plan({}, {"step_s": 1.0, "memory_peak": 3e9}) == []
    step, memory = beside_plan(
        {"step_s": 1.0, "memory_peak": 2e9}, {"step_s": 1.2, "memory_peak": 1e9}
    )
    assert step == "a step was planned at 1 s and is 1.2 s (+20%)"
    assert memory == "the peak of memory was planned at 2.0 GB and is 1.0 GB (-50%)"
