"""The real training under our launcher: detached, attached, stopped, gone on; and branches."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foundling.checkpoint.paths import find_checkpoint
from foundling.checkpoint.folders import list_checkpoints
from foundling.checkpoint.bundle import load_bundle
from foundling.checkpoint.manifest import load_meta
from foundling.cli.main import run_verb
from foundling.config.errors import ConfigError
from foundling.config.run import RunConfig
from foundling.config.errors import RunError
from foundling.config.load import dump_yaml
from foundling.config.load import load_run_config
from foundling.runtime.run_dir import RunDir
from foundling.runtime.lock import is_locked
from foundling.runtime.lock import read_holder
from foundling.runtime.run_dir import read_lines

ROOT = Path(__file__).parents[2]


def foundling(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "foundling", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


def write(config: RunConfig, path: Path) -> str:
    path.write_text(dump_yaml(config))
    return str(path)


def wait_until(what: Callable[[], object], seconds: float = 90) -> None:
    last = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < last, "it never came"
        time.sleep(0.05)


def steps(run: Path) -> list[int]:
    return [line["step"] for line in read_lines(RunDir(run).metrics_path)]


def test_a_detached_run_is_followed_stopped_and_goes_on(tiny: RunConfig, tmp_path: Path) -> None:
    many = tiny.replace(train={"horizon": 100_000, "batch_size": 2, "global_batch_tokens": 4 * 64}, data={"allow_repeat": 1e6}, eval={"every": 0, "tokens": 65536}, checkpoint={"every": 1000})
    run = tmp_path / "run"
    file = write(many, tmp_path / "many.yaml")
    done = foundling("train", file, "--run", str(run), "--nproc", "2", "--detach")
    assert done.returncode == 0, done.stderr
    holder = read_holder(run)
    assert holder is not None
    assert os.getsid(holder.pid) == holder.pid, "a session of its own survives the terminal"
    os.kill(holder.pid, signal.SIGHUP)
    wait_until(lambda: len(steps(run)) > 20)
    again = foundling("train", file, "--run", str(run), "--nproc", "2")
    assert again.returncode == 2
    assert f"in use by process {holder.pid} on" in again.stderr
    stopped = foundling("runs", "stop", str(run), "--wait", "60")
    assert stopped.returncode == 0, stopped.stderr
    assert not is_locked(run)
    last = steps(run)[-1]
    assert f"saved at step {last}" in stopped.stdout
    assert load_meta(find_checkpoint(run)[1])["step"] == last
    assert f"saved at step {last} after SIGTERM" in foundling("runs", "logs", str(run)).stdout
    assert foundling("runs", "logs", str(run), "--rank", "1").returncode == 0
    assert f"saved at step {last}" in foundling("runs", "logs", str(run), "--follow").stdout


def test_sigterm_to_a_run_of_one_process_saves_and_ends_with_75(
    tiny: RunConfig, tmp_path: Path
) -> None:
    long = tiny.replace(train={"horizon": 100_000}, data={"allow_repeat": 1e6}, checkpoint={"every": 100_000})
    file, run = write(long, tmp_path / "long.yaml"), tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "foundling", "train", file, "--run", str(run)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(steps(run)) > 3)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75
    last = steps(run)[-1]
    assert f"saved at step {last} after SIGTERM" in said
    assert load_meta(find_checkpoint(run)[1])["step"] == last
    events = [line["event"] for line in read_lines(RunDir(run).events_path)]
    assert events[-1] == "stopped"


@pytest.fixture
def parent(tiny: RunConfig, tmp_path: Path) -> RunDir:
    from foundling.train.loop import train

    run = RunDir(tmp_path / "parent")
    train(tiny, run)
    return run


def weights(path: str) -> dict[str, torch.Tensor]:
    return load_bundle(path).model.state_dict()


def test_a_branch_without_a_change_is_the_same_run(parent: RunDir) -> None:
    """Optimizer, data position, schedule and ledger go on: to the bit."""
    run_verb(["train", "--from", f"{parent.path}@6"])
    child = RunDir(parent.path.with_name("parent-from-6"))
    stated = {"path": str(parent.path), "step": 6, "kind": "branch"}
    assert child.read_info()["parent"] == stated
    left, right = weights(str(parent.path)), weights(str(child.path))
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
    for field in ("step", "loss", "tokens", "total_tokens", "sources"):
        one, other = ([line[field] for line in read_lines(r.metrics_path)] for r in (parent, child))
        assert one == other
    assert len(list_checkpoints(parent.checkpoints)) == 2, "the parent is as it was"


def test_a_branch_with_other_settings_shares_the_past_and_not_the_future(parent: RunDir) -> None:
    words = ["--optim.lr", "0.1", "--train.horizon", "9", "--run", str(parent.path) + "-hot"]
    run_verb(["train", "--from", f"{parent.path}@6", *words])
    hot = RunDir(Path(str(parent.path) + "-hot"))
    old, new = (read_lines(run.metrics_path) for run in (parent, hot))
    assert [line["step"] for line in new] == list(range(1, 10))
    assert [line["loss"] for line in new[:7]] == [line["loss"] for line in old[:7]]
    assert new[7]["loss"] != old[7]["loss"]
    assert new[6]["lr"] != old[6]["lr"]
    assert load_run_config(hot.config_path).train.start == f"{parent.path}@6"


def test_branches_that_make_no_sense_are_refused(parent: RunDir, tiny: RunConfig) -> None:
    with pytest.raises(ConfigError, match="stands at step 6 and the horizon is 5"):
        run_verb(["train", "--from", f"{parent.path}@6", "--train.horizon", "5"])
    with pytest.raises(RunError, match="no checkpoint of step 4"):
        run_verb(["train", "--from", f"{parent.path}@4"])


def test_a_branch_of_another_shape_leaves_no_run(parent: RunDir) -> None:
    child = RunDir(parent.path.with_name("child"))
    for words, told in (
        (["--model.dim", "64"], "model.dim 32 and not 64"),
        (["--model.heads", "4"], "model.heads 2 and not 4"),
    ):
        with pytest.raises(ConfigError, match=told):
            run_verb(["train", "--from", f"{parent.path}@6", "--run", str(child.path), *words])
        assert not child.exists
        assert not child.checkpoints.exists()


def test_a_branch_never_builds_on_another_parents_leavings(
    parent: RunDir, tiny: RunConfig, tmp_path: Path
) -> None:
    from foundling.train.start_point import copy_checkpoint
    from foundling.train.loop import train

    other = RunDir(tmp_path / "other")
    train(tiny.replace(train={"seed": 99}), other)
    child = RunDir(tmp_path / "child")
    words = ["train", "--from", f"{parent.path}@6", "--run", str(child.path)]
    child.path.mkdir()
    (child.path / "lock").touch()  # as a start leaves it that was cut off
    for step in (6, 8):  # of the same step as what is asked for, and of another
        left = copy_checkpoint(find_checkpoint(f"{other.path}@{step}")[1], child.checkpoints)
        with pytest.raises(RunError, match="is there already and is not"):
            run_verb(words)
        assert not child.exists
        shutil.rmtree(left)
    copy_checkpoint(find_checkpoint(f"{parent.path}@6")[1], child.checkpoints)
    run_verb(words)  # an earlier try of the same command
    one, two = weights(str(parent.path)), weights(str(child.path))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
