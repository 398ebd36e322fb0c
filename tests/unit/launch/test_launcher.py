"""A job of two gloo processes under our launcher: crashes, kills, signals, and how it ends.

Each launch costs seconds of imports, so a few of them carry many claims.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from foundling.config.errors import RunError
from foundling.launch.logs import newest_log, tries
from foundling.runtime.lock import RunLock, is_locked, read_holder

ROOT = Path(__file__).parents[3]
LAUNCH = """
import sys
from pathlib import Path
from foundling.launch.launcher import LaunchSpec as Job, launch
from foundling.runtime.exits import EndOfRun
run = Path(sys.argv[1])
try:
    launch(Job(run=run, processes=2, command=("fake_training", *sys.argv[1:]), grace_s=20))
except EndOfRun as end:
    print(f"told: {end}", flush=True)
    sys.exit(end.code)
"""


def start(run: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"}
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(run), *words],
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_until(what: Callable[[], object], seconds: float = 90) -> None:
    last = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < last, "it never came"
        time.sleep(0.02)


def begun(run: Path, number: int) -> Callable[[], bool]:
    """Whether both ranks of a try have begun their steps."""

    def look() -> bool:
        logs = [folder for folder in tries(run) if folder.name == f"try-{number}"]
        texts = [path.read_text() for path in logs[-1].glob("rank-*.log")] if logs else []
        return sum("begins at step" in text for text in texts) == 2

    return look


def pid_of(run: Path, rank: int) -> int:
    return int((tries(run)[-1] / f"rank-{rank:05d}.pid").read_text())


def saved(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in run.glob("checkpoints/step-*"))


@pytest.mark.parametrize("victim", ["rank", pytest.param("torchrun", marks=pytest.mark.full)])
def test_a_killed_process_is_started_again_and_sigterm_to_a_rank_saves(
    victim: str, tmp_path: Path
) -> None:
    fault = "kill:1:12" if victim == "rank" else "parent:1:12"
    job = start(tmp_path, "--agree", "--steps", "100000", "--fault", fault)
    wait_until(begun(tmp_path, 1))
    with pytest.raises(RunError, match=f"process {job.pid} on"), RunLock(tmp_path):
        pass
    os.kill(pid_of(tmp_path, 1), signal.SIGTERM)
    out, _ = job.communicate(timeout=60)
    assert job.returncode == 75, out
    assert "was killed by SIGKILL; starting again from step 10 (try 2)" in out
    assert ("torchrun (process" in out) is (victim == "torchrun")
    said = [line for line in out.splitlines() if "after SIGTERM" in line]
    assert said == [f"ends with 75: saved at step {saved(tmp_path)[-1]} after SIGTERM"]
    assert "rank 1 begins" not in out, "only rank 0 is shown"
    assert "rank 1 begins at step 10" in (tries(tmp_path)[1] / "rank-00001.log").read_text()
    assert not is_locked(tmp_path)
    assert read_holder(tmp_path) is None


def test_one_ctrl_c_to_the_launcher_saves_and_the_next_launch_goes_on(tmp_path: Path) -> None:
    job = start(tmp_path, "--agree", "--steps", "100000")
    wait_until(begun(tmp_path, 0))
    began = time.monotonic()
    job.send_signal(signal.SIGINT)
    out, _ = job.communicate(timeout=60)
    assert job.returncode == 75, out
    assert time.monotonic() - began < 15
    step = saved(tmp_path)[-1]
    assert f"saved at step {step} after SIGINT" in out, "a Ctrl-C is told as one"
    job = start(tmp_path, "--agree", "--steps", str(step + 3))
    out, _ = job.communicate(timeout=90)
    assert job.returncode == 0, out
    assert f"rank 0 begins at step {step}" in out
    assert saved(tmp_path)[-1] == step + 3
    log = newest_log(tmp_path)
    assert log is not None
    assert "ends with 0" in log.read_text()


def test_kill_minus_nine_of_the_launcher_leaves_nobody_behind(tmp_path: Path) -> None:
    job = start(tmp_path, "--steps", "100000")
    wait_until(begun(tmp_path, 0))
    ranks = [pid_of(tmp_path, rank) for rank in (0, 1)]
    job.kill()
    job.communicate(timeout=30)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), 10)
    assert not is_locked(tmp_path)
    holder = read_holder(tmp_path)
    assert holder is not None
    assert holder.pid == job.pid, "who left it is still known"


def test_a_mistake_is_not_tried_again(tmp_path: Path) -> None:
    job = start(tmp_path, "--steps", "100000", "--fault", "user:0:3")
    out, _ = job.communicate(timeout=90)
    assert job.returncode == 2, out
    assert "planted mistake; repair it." in out
    assert len(tries(tmp_path)) == 1
    outcome = json.loads((tries(tmp_path)[0] / "rank-00000.json").read_text())
    assert (outcome["code"], outcome["sentence"]) == (2, "planted mistake; repair it.")
