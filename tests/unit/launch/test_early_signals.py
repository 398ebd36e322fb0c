"""Signals and kills while processes of a training are being set up: the code, one line, at once."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from foundling.config.load import dump_yaml
from foundling.config.run import RunConfig
from foundling.launch.logs import tries

ROOT = Path(__file__).parents[3]
SOON_S = 15.0
"""Far below the thirty seconds that torchrun gives a rank which does not act on its SIGTERM."""


def wait_until(what: Callable[[], object], seconds: float = 90) -> None:
    last = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < last, "it never came"
        time.sleep(0.01)


def imports_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def ranks(run: Path, number: int = 0) -> list[int]:
    """Processes of both ranks, once they import torch."""
    folder = next((path for path in tries(run) if path.name == f"try-{number}"), None)
    found = [int(path.read_text() or 0) for path in sorted(folder.glob("*.pid"))] if folder else []
    return found if len(found) == 2 and all(found) and all(map(imports_torch, found)) else []


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tiny: RunConfig, tmp_path: Path) -> Iterator[Start]:
    """`foundling train` of a run that would take hours, in tmp_path / run."""
    long = tiny.replace(
        train={"horizon": 100_000, "batch_size": 2, "global_batch_tokens": 4 * 64},
        data={"allow_repeat": 1e6},
        checkpoint={"every": 100_000},
        eval={"every": 100_000},
    )
    (tmp_path / "long.yaml").write_text(dump_yaml(long))
    jobs = []

    def begin(processes: int) -> "subprocess.Popen[str]":
        words = ["train", str(tmp_path / "long.yaml"), "--run", str(tmp_path / "run")]
        job = subprocess.Popen(
            [sys.executable, "-m", "foundling", *words, "--nproc", str(processes)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        jobs.append(job)
        return job

    yield begin
    for job in jobs:
        job.kill()
        job.communicate()


@pytest.mark.parametrize(
    ("processes", "number", "code"),
    [(1, signal.SIGINT, 130), (2, signal.SIGINT, 130), (2, signal.SIGUSR1, 75)],
)
def test_a_signal_while_torch_is_imported_ends_with_its_code_and_a_line(
    processes: int, number: signal.Signals, code: int, start: Start, tmp_path: Path
) -> None:
    """Two are told through the launcher by Ctrl-C, and one of them by itself by SIGUSR1."""
    job, run = start(processes), tmp_path / "run"
    wait_until(lambda: imports_torch(job.pid) if processes == 1 else ranks(run))
    began = time.monotonic()
    os.kill(job.pid if number == signal.SIGINT else ranks(run)[1], number)
    _, told = job.communicate(timeout=60)
    assert time.monotonic() - began < SOON_S
    assert job.returncode == code, told
    assert "Traceback" not in told
    (line,) = [line for line in told.splitlines() if "before the first step" in line]
    assert line.startswith(("foundling: interrupted", "foundling: stopped by "))
    assert not run.exists(), "nothing was begun"


def test_a_rank_killed_in_set_up_is_started_again_at_once_and_two_ctrl_cs_end_it(
    start: Start, tmp_path: Path
) -> None:
    job, run = start(2), tmp_path / "run"
    wait_until(lambda: ranks(run))
    began = time.monotonic()
    os.kill(ranks(run)[1], signal.SIGKILL)
    wait_until(lambda: len(tries(run)) == 2)
    assert time.monotonic() - began < SOON_S
    metrics = run / "metrics.jsonl"
    wait_until(lambda: metrics.is_file() and metrics.stat().st_size > 0)
    pids = ranks(run, 1)
    with contextlib.suppress(ProcessLookupError):  # it has ended
        for _ in range(50):  # two that come too close to each other are one
            os.kill(pids[0], signal.SIGINT)
            time.sleep(0.002)
    out, told = job.communicate(timeout=60)
    assert job.returncode == 130, out + told
    assert "was killed by SIGKILL; starting again from step 0 (try 2)" in out
