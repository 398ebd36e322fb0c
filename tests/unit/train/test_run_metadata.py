"""What is predict_run, and the sentence when a run does not keep to it."""

import re
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from run_tools import train_until

from foundling.config.load import load_config
from foundling.config.run import RunConfig
from foundling.plan.forecast import FIGURES, predict_run
from foundling.plan.horizon import plan_horizon
from foundling.runtime import console
from foundling.runtime.run_dir import RunDir, read_lines
from foundling.train import evaluation, loop
from foundling.train import step as step_module
from foundling.train.loop import train
from foundling.train.run_metadata import known_device, overruns, planned_and_measured


def test_an_unmeasured_cpu_is_not_guessed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FOUNDLING_HOME", str(tmp_path))
    assert known_device(torch.device("cpu")) is None
    config = load_config("hamlet", {"train.horizon": "9"})
    found = predict_run(config, "cpu", None, 1, plan_horizon(config, 1))
    assert set(found) == {"start_s", "compile_s"}, "no seconds of a step"


def test_only_what_is_beyond_the_tolerance_is_told() -> None:
    assert overruns({"step_s": 1.0}, {"step_s": 1.1}) == []
    assert overruns({}, {"step_s": 1.1}) == []
    (told,) = overruns({"step_s": 1.0, "memory_peak": 100}, {"step_s": 1.2, "memory_peak": 90})
    assert "20% slower than planned" in told
    (told,) = overruns({"memory_peak": 100}, {"memory_peak": 150})
    assert "50% larger than planned" in told


def test_what_was_planned_stands_beside_what_it_is() -> None:
    assert planned_and_measured({}, {"step_s": 1.0, "memory_peak": 3e9}) == []
    step, memory = planned_and_measured(
        {"step_s": 1.0, "memory_peak": 2e9}, {"step_s": 1.2, "memory_peak": 1e9}
    )
    assert step == "a step was planned at 1 s and is 1.2 s (+20%)"
    assert memory == "the peak of memory was planned at 2.0 GB and is 1.0 GB (-50%)"


def test_what_is_no_step_is_told_beside_the_steps(
    tiny: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Neither the first step of each process, which compiles, nor scores are training time; each is
    planned and measured by itself, in run.json and in the table at the end."""
    fresh = [True]
    real = step_module.train_step, evaluation.held_out_bpb

    def take(*args: Any, **more: Any) -> Any:
        time.sleep(0.4 * fresh.pop() if fresh else 0)
        return real[0](*args, **more)

    def score(*args: Any, **more: Any) -> Any:
        time.sleep(0.2)
        return real[1](*args, **more)

    monkeypatch.setattr(loop, "train_step", take)
    monkeypatch.setattr(step_module, "train_step", take)  # what the killed run goes through
    monkeypatch.setattr(evaluation, "held_out_bpb", score)
    run = RunDir(tmp_path / "run")
    # The last score is after step 33; the first process dies at 20, and step 17 is taken again.
    config = tiny.replace(train={"horizon": 33}, checkpoint={"every": 16}, eval={"every": 16})
    train_until(config, run, 20, monkeypatch)
    fresh.append(True)
    console.console.cache_clear()
    train(config, run)
    console.console.cache_clear()
    said = capsys.readouterr().out
    plan, lines = run.read_info()["plan"], read_lines(run.metrics_path)
    for part in ("start_s", "compile_s", "train_s", "save_s", "eval_s"):
        label, _ = FIGURES[part]
        assert re.search(rf"^  {label} +\S.* \(planned ", said, re.MULTILINE), said
        assert part in plan["predicted"]
    found = plan["measured"]
    others = [line["step_s"] for line in lines if "start_s" not in line]
    # The two first steps, each 0.4 s longer than others, whose own time is taken off as measured.
    assert found["compile_s"] > 0.75
    usual = 2 * statistics.median(others)
    assert found["train_s"] == pytest.approx(sum(others) + usual)
    assert found["train_s"] + found["compile_s"] == pytest.approx(sum(x["step_s"] for x in lines))
    assert [line["step"] for line in lines if "start_s" in line] == [1, 17]
    assert found["start_s"] > 0
    assert 0.6 < found["eval_s"] < 2, "at 16, 32 and 33"
    assert found["save_s"] > sum(line.get("save_s", 0) for line in lines) > 0
