"""Gloo processes under a torchrun of the user's own train as one process does."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foundling.checkpoint.folders import list_checkpoints
from foundling.config.run import RunConfig
from foundling.config.load import dump_yaml
from foundling.runtime.run_dir import RunDir
from foundling.runtime.run_dir import read_lines
from foundling.train.loop import train


def launch(config: RunConfig, run: Path, processes: int) -> None:
    file = run.parent / f"{run.name}.yaml"
    file.write_text(dump_yaml(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # After the dashes torchrun leaves our options alone: it would take --run for its --run-path.
    command += ["--nproc-per-node", str(processes), "-m", "--", "foundling"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "train", str(file), "--run-dir", str(run)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def lines(run: Path) -> list[dict[str, Any]]:
    return read_lines(RunDir(run).metrics_path)


def assert_alike(one: list[dict[str, Any]], many: list[dict[str, Any]]) -> None:
    for name in ("step", "tokens", "targets", "sources"):
        assert [line[name] for line in one] == [line[name] for line in many]
    for left, right in zip(one, many, strict=True):
        assert right["loss"] == pytest.approx(left["loss"], rel=1e-5)
        assert right["grad_norm"] == pytest.approx(left["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.full)])
def test_ranks_together_take_the_steps_of_one_and_one_goes_on_alone(
    processes: int, tiny: RunConfig, tmp_path: Path
) -> None:
    # Seven rows: divides by neither two nor three, so the last rank has rows that count nothing.
    config = tiny.replace(train={"horizon": 6, "batch_size": 2, "global_batch_tokens": 7 * 64})
    train(config, RunDir(tmp_path / "one"))
    run = RunDir(tmp_path / "many")
    launch(config, run.path, processes)
    assert_alike(lines(tmp_path / "one"), lines(run.path))
    info = run.read_info()
    assert info["status"] == "finished"
    # As if it had been stopped after its first checkpoint and taken to a smaller machine.
    for path in list_checkpoints(run.checkpoints)[1:]:
        shutil.rmtree(path)
    run.info_path.write_text(json.dumps({**info, "status": "running"}))
    train(config, run)
    assert_alike(lines(tmp_path / "one"), lines(run.path))
