"""Two nodes, played by two launchers on this machine: a rank of the second dies, both try again."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from foundling.launch.logs import tries

ROOT = Path(__file__).parents[3]
NODE = """
import sys
from pathlib import Path
from foundling.launch.launcher import LaunchSpec as Job, launch
from foundling.launch.environment import detect_environment
from foundling.runtime.exits import EndOfRun
try:
    launch(Job(run=Path(sys.argv[1]), processes=1, place=detect_environment(1),
               command=("fake_training", *sys.argv[1:]), grace_s=20))
except EndOfRun as end:
    print(f"told: {end}", flush=True)
    sys.exit(end.code)
"""


def start_node(run: Path, node: int, job: int, *words: str) -> subprocess.Popen[str]:
    step = {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "n[0-1]",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(node),
        "SLURM_LOCALID": "0",
        "SLURM_JOB_END_TIME": "9999999999",
        "MASTER_ADDR": "127.0.0.1",
        "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", NODE, str(run), *words],
        env={**os.environ, **step},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_job() -> int:
    """A job number whose port nobody uses."""
    from foundling.launch.environment import FIRST_PORT, PORTS

    for job in range(1, 50):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", FIRST_PORT + job * 97 % PORTS))
            except OSError:
                continue
            return job
    raise AssertionError("every port is taken")


@pytest.mark.full
@pytest.mark.parametrize("fault", ["kill:1:12", "crash:0:12"])
def test_a_rank_that_dies_on_one_node_is_started_again_on_both(fault: str, tmp_path: Path) -> None:
    job = free_job()
    words = ("--agree", "--steps", "40", "--fault", fault)
    nodes = [start_node(tmp_path, node, job, *words) for node in (0, 1)]
    outs = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outs
    assert "starting again from step 10 (try 2)" in outs[0]
    assert [folder.name for folder in tries(tmp_path)] == ["try-0", "try-1"]
    assert (tmp_path / "checkpoints" / "step-00000040").is_dir()
    assert outs[1] == "", "the first node speaks for both"


@pytest.mark.full
def test_a_mistake_ends_both_nodes_with_its_code(tmp_path: Path) -> None:
    job = free_job()
    nodes = [start_node(tmp_path, n, job, "--agree", "--fault", "user:1:3") for n in (0, 1)]
    outs = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [2, 2], outs
    assert "planted mistake" in outs[0]
    assert len(tries(tmp_path)) == 1
