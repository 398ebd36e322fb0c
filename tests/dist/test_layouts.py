"""Every layout trains as one process does, and a run goes on under another layout."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foundling.checkpoint import list_checkpoints, step_of
from foundling.config import RunConfig
from foundling.config.resolve import dump_yaml
from foundling.runtime import RunDir
from foundling.runtime.rundir import read_lines
from foundling.train.loop import train

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp 2": (2, {"shard": 2}),
    "tensor 2": (2, {"tensor": 2}),
    "fsdp1 2": (2, {"shard": 2, "fsdp1": True}),
    "hsdp 2 x 2": (4, {"shard": 2}),
    "fsdp x tensor 2 x 2": (4, {"shard": 2, "tensor": 2}),
}


def launch(config: RunConfig, run: Path, processes: int) -> None:
    file = run.parent / f"{run.name}.yaml"
    file.write_text(dump_yaml(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), "-m", "foundling.cli"]
    done = subprocess.run(
        [*command, "train", str(file), "--run-dir", str(run)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def laid_out(config: RunConfig, **degrees: Any) -> RunConfig:
    return replace(config, parallel=replace(config.parallel, **degrees))


@pytest.fixture
def short(tiny: RunConfig) -> RunConfig:
    train = replace(tiny.train, steps=4, batch_size=2, global_batch_tokens=8 * 64)
    evaluation = replace(tiny.eval, every=4, sample_every=4, sample_tokens=4, prompts=("About",))
    return replace(tiny, train=train, eval=evaluation)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_as_one_process_does(name: str, short: RunConfig, tmp_path: Path) -> None:
    processes, degrees = LAYOUTS[name]
    train(short, RunDir(tmp_path / "one"))
    launch(laid_out(short, **degrees), tmp_path / "many", processes)
    one, many = RunDir(tmp_path / "one"), RunDir(tmp_path / "many")
    left, right = read_lines(one.metrics_path), read_lines(many.metrics_path)
    for field in ("step", "tokens", "targets", "sources"):
        assert [line[field] for line in left] == [line[field] for line in right]
    for a, b in zip(left, right, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=2e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)
    score, other = read_lines(one.evals_path)[-1], read_lines(many.evals_path)[-1]
    assert other["bpb"] == pytest.approx(score["bpb"], rel=1e-4)
    assert len(read_lines(many.samples_path)) == 1


def test_a_run_goes_on_under_another_layout(short: RunConfig, tmp_path: Path) -> None:
    whole = replace(short, train=replace(short.train, steps=8))
    train(whole, RunDir(tmp_path / "whole"))
    run = RunDir(tmp_path / "moved")
    stop = replace(whole, checkpoint=replace(whole.checkpoint, every=3, keep=9))
    launch(laid_out(stop, shard=2, tensor=2), run.path, 4)
    for folder in list_checkpoints(run.checkpoints):
        if (step_of(folder) or 0) > 3:
            shutil.rmtree(folder)
    run.update_info(status="running")
    launch(laid_out(stop, shard=2, fsdp1=True), run.path, 2)
    lines, expected = (
        read_lines(run.metrics_path),
        read_lines(RunDir(tmp_path / "whole").metrics_path),
    )
    for a, b in zip(expected, lines, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
