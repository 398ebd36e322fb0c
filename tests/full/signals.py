"""Signals at random moments to the launcher and to the ranks of a real run: saved, 75, the same."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from foundling.runtime.processes import EARLY
from tests.full.tiny_runs import ROOT, assert_same, build_data, flags, foundling, steps_per_second

MOMENTS = 20
GRACE_S = 60.0
TARGETS = ("launcher", "rank 0", "rank 1")
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


def signals() -> dict[str, Any]:
    """20 signals at random moments to launcher or rank: saved and 75 in time, or a Ctrl-C in the
    set-up and 130; the same run."""
    home = ROOT / "runs" / "full" / "signals"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    text = build_data(home)
    steps = int(steps_per_second(home, text) * 6 * MOMENTS)
    words = ["train", "hamlet", "--nproc", "2", *flags(text, steps)]
    chance, taken = random.Random(5), []
    for number in range(MOMENTS):
        target, name = TARGETS[number % 3], SIGNALS[number % 4]
        taken.append(_told(home / "told", words, target, name, chance.uniform(0, 12)))
        print(f"  {name.name} to {target}: {taken[-1]:.1f} s", flush=True)
    foundling(*words, "--run", str(home / "told"))
    foundling(*words, "--run", str(home / "whole"))
    assert_same(home / "whole", home / "told")
    return {"signals": MOMENTS, "steps": steps, "slowest_s": round(max(taken), 1)}


def _told(run: Path, words: list[str], target: str, number: signal.Signals, delay: float) -> float:
    """Start the run, tell it to stop after a while, and see how it ends; in seconds."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "foundling", *words, "--run", str(run)]
    with open(run.parent / "out.log", "ab") as log:
        job = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    _wait(lambda: (run / "lock").is_file() and str(job.pid) in (run / "lock").read_text())
    time.sleep(delay)
    pid = job.pid if target == "launcher" else _rank(run, job.pid, int(target[-1]))
    os.kill(pid, number)
    began = time.monotonic()
    code = job.wait(timeout=GRACE_S)
    # A Ctrl-C in the set-up of a start has nothing to save.
    early = (
        number == signal.SIGINT and EARLY in (run.parent / "out.log").read_text().splitlines()[-1]
    )
    assert code == (130 if early else 75), (
        f"{number.name} to {target} after {delay:.1f} s ended with {code}"
    )
    return time.monotonic() - began


def _rank(run: Path, launcher: int, rank: int) -> int:
    """The process of a rank, as soon as there is one."""
    pattern = f"logs/*-{launcher}/try-0/rank-{rank:05d}.pid"
    _wait(lambda: any(path.read_text() for path in run.glob(pattern)))
    return int(next(run.glob(pattern)).read_text())


def _wait(what: Any, limit_s: float = 60) -> None:
    last = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < last, "it did not start"
        time.sleep(0.02)
