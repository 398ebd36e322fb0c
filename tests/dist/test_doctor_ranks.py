"""doctor, rehearse and bench train --layouts for real: two gloo processes, and jobs that are not well."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from foundling.config.run import RunConfig
from foundling.config.load import dump_yaml
from foundling.launch.bad_nodes import read_bad_nodes
from foundling.runtime.processes import run_ranks

ROOT = Path(__file__).parents[2]
# The second rank says another version of torch and that its kernels compute nonsense.
ODD_RANK = """
import os, sys
from foundling.doctor import examine; from foundling.runtime import versions
from foundling.doctor.checks import failed
real = versions.own_versions
if os.environ["RANK"] == "1":
    examine.own_versions = lambda: {**real(), "torch": "2.0.0"}
    examine.own_line = lambda _: failed("kernels", "matmul is wrong; leave it out.", of_node=True)
examine.OF_DEVICE = ()
examine.OF_NODE = ()
examine._joint_trials = lambda *_: {}
sys.argv = ["foundling", "doctor", "--run", sys.argv[1], "--limit", "60"]
from foundling.cli.main import main
main()
"""


@pytest.fixture(autouse=True)
def quiet_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def foundling(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "foundling", *words]
    return subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=300)


def write(config: RunConfig, path: Path) -> str:
    path.write_text(dump_yaml(config))
    return str(path)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_two_ranks_are_examined_together(tiny: RunConfig, tmp_path: Path) -> None:
    """With a setting that fails: the disk is too small for a billion checkpoints."""
    file = write(
        tiny.replace(checkpoint={"keep": 1_000_000_000}),
        tmp_path / "mine.yaml",
    )
    run = tmp_path / "run"
    done = foundling("doctor", file, "--run", str(run), "--nproc", "2", "--json")
    assert done.returncode == 2, done.stderr
    told = json.loads(done.stdout)
    assert told["level"] == "fail"
    [first, second] = told["ranks"]
    by_check = {line["check"]: line for line in first["lines"]}
    assert [line["check"] for line in first["lines"] if line["level"] == "fail"] == ["disk"]
    assert by_check["gloo"]["facts"]["ranks"] == 2
    assert by_check["gloo"]["facts"]["all_reduce"] > 1e6
    assert "2 ranks together" in by_check["trial step"]["text"]
    assert abs(by_check["trial step"]["facts"]["loss"] - 6.05) < 0.1
    assert {"kernels", "memory", "matmul rate", "data", "checkpoints"} <= by_check.keys()
    assert {line["check"] for line in second["lines"]} == {"versions", "gloo"}
    assert done.stderr.splitlines()[-1] == (
        "foundling: checks failed; the lines above say what to do."
    )
    assert not run.exists(), "looking at a run leaves nothing behind"


@pytest.mark.timeout(200)
def test_a_rank_that_is_unfit_ends_with_71_and_its_node_is_written_down(tmp_path: Path) -> None:
    [first, second] = run_ranks(["-c", ODD_RANK, str(tmp_path)], 2, limit_s=150)
    assert (first.code, second.code) == (71, 71), first.err + second.err
    assert "torch is" in first.out
    assert "rank 1 on" in first.out
    assert "with 2.0.0; install the same environment on every node" in first.out
    assert second.out == "", "rank 0 speaks"
    assert read_bad_nodes(tmp_path) == [os.uname().nodename]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("word", "stage", "steps"),
    [
        ("tiny", "tiny on a CPU", 20),
        pytest.param("two", "two processes", 60, marks=pytest.mark.full),
    ],
)
def test_a_stage_is_rehearsed_killed_and_resumed(
    word: str, stage: str, steps: int, tiny: RunConfig, tmp_path: Path
) -> None:
    file = write(tiny.replace(parallel={"shard": 2}), tmp_path / "mine.yaml")
    done = foundling("rehearse", file, "--only", word, "--steps", str(steps), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    points = {point["what"]: point for point in told["points"] if point["stage"] == stage}
    assert points["first loss"]["state"] == points["falling loss"]["state"] == "go"
    assert points[f"killed and resumed: losses of {steps} steps"]["detail"] == "bit for bit"
    # What a rank of several holds is compared on CUDA only.
    assert points["memory"]["state"] == ("go" if word == "tiny" else "not proved")
    others = {p["stage"]: p["state"] for p in told["points"] if p["stage"] != stage}
    assert set(others.values()) == {"not proved"}
    assert "killed (SIGKILL) after step" in done.stderr
    assert "going on from the checkpoint of step" in done.stderr


@pytest.mark.timeout(300)
def test_layouts_are_measured_on_the_same_rows(tiny: RunConfig, tmp_path: Path) -> None:
    file = write(tiny, tmp_path / "mine.yaml")
    words = ("--nproc", "2", "--layouts", "fsdp2,hsdp", "--steps", "2", "--json")
    done = foundling("bench", "train", file, *words)
    assert done.returncode == 0, done.stderr
    [fsdp2, hsdp] = json.loads(done.stdout)["layouts"]
    assert fsdp2["tokens_per_s"] > 0
    assert fsdp2["memory"] > 0
    assert fsdp2["talk_share"] < 1
    assert abs(fsdp2["loss"] - 6.05) < 0.2
    assert "hsdp needs 4 processes" in hsdp["refusal"]
