"""Run the demo, kill it with SIGKILL at random moments, start it again, until it is through."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_S = 900
START_S = 3.0
"""What every start pays for its imports before it gets on with the work."""


def run_demo(folder: Path, scale: str, seed: int = 1, package: Path | None = None) -> float:
    """One undisturbed demo, by the package installed in a folder if one is given; its seconds."""
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(package)} if package else None
    subprocess.run(
        _command(folder, scale, seed),
        check=True,
        stdout=subprocess.DEVNULL,
        env=environment,
        cwd=package,
    )
    return time.monotonic() - began


def run_killed(folder: Path, scale: str, kills: int, whole_s: float, rng: random.Random) -> int:
    """A demo killed `kills` times while it is alive, at random moments of what is left of it."""
    hits = 0
    for attempt in range(3 * kills):
        if hits == kills:
            break
        child = subprocess.Popen(
            _command(folder, scale, 1), stdout=subprocess.DEVNULL, start_new_session=True
        )
        # About the last share of the whole, since what was done is not done again.
        left = whole_s * (1 - hits / (kills + 1)) / (kills + 1 - hits)
        time.sleep(START_S * (attempt > 0) + rng.uniform(0.05, 1.9) * left)
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            hits += 1
        elif child.wait() == 0:
            break  # it came through: nothing is left to kill
        child.wait()
    subprocess.run(
        _command(folder, scale, 1), check=True, stdout=subprocess.DEVNULL, timeout=GRACE_S
    )
    return hits


def _command(folder: Path, scale: str, seed: int) -> list[str]:
    words = ["demo", "--scale", scale, "--seed", str(seed), "--folder", str(folder)]
    return [sys.executable, "-m", "foundling", *words]
