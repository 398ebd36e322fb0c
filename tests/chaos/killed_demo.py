"""Run the demo, kill it with SIGKILL at random moments, start it again, until it is through."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_S = 900


def run_demo(folder: Path, scale: str, seed: int = 1) -> float:
    """One undisturbed demo; its seconds."""
    began = time.monotonic()
    subprocess.run(_command(folder, scale, seed), check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def run_killed(folder: Path, scale: str, kills: int, whole_s: float, rng: random.Random) -> int:
    """A demo killed `kills` times, spread over its length; returns how many kills hit it alive."""
    hits = 0
    for _ in range(kills):
        child = subprocess.Popen(
            _command(folder, scale, 1), stdout=subprocess.DEVNULL, start_new_session=True
        )
        # A little more than an even share of the whole, since every start pays for its imports.
        time.sleep(rng.uniform(0.02, 2.2) * whole_s / kills)
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            hits += 1
        child.wait()
    subprocess.run(
        _command(folder, scale, 1), check=True, stdout=subprocess.DEVNULL, timeout=GRACE_S
    )
    return hits


def _command(folder: Path, scale: str, seed: int) -> list[str]:
    words = ["demo", "--scale", scale, "--seed", str(seed), "--folder", str(folder)]
    return [sys.executable, "-m", "foundling.cli", *words]
