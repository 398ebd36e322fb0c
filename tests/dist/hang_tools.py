"""Start the stand-in, under torchrun or quickly by hand, and read what its watchdog said."""

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stand_in
from forks import run_ranks

from foundling.runtime.run_dir import RunDir
from foundling.runtime.run_dir import read_lines

LIVES = 3


@dataclass(frozen=True)
class Ended:
    """How one job ended."""

    code: int
    text: str
    """Everything that was written to stderr."""
    seconds: float
    weights: str
    hangs: list[dict[str, Any]]


def under_torchrun(
    folder: Path, fault: str, *, processes: int, steps: int = 12, limit_s: float = 3.0
) -> Ended:
    """One job of the stand-in, restarted by torchrun."""
    folder.mkdir(parents=True, exist_ok=True)
    script = Path(stand_in.__file__)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--max-restarts", str(LIVES - 1), "--monitor-interval", "0.1"]
    command += ["--nproc-per-node", str(processes), str(script)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        # Stale keys of the life before make a restarted gloo job hang.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PYTHONPATH": str(script.parents[2]),
    }
    began = time.monotonic()
    done = subprocess.run(
        [*command, str(folder), str(steps), str(limit_s), fault],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return _ended(folder, done.returncode, done.stderr, began)


def by_hand(
    folder: Path, fault: str, *, processes: int, steps: int = 12, limit_s: float = 2.0
) -> Ended:
    """The same without torchrun and its imports."""
    began, code = time.monotonic(), 0
    errors = folder / "stderr"
    for life in range(LIVES):
        code = run_ranks(
            stand_in.main, RunDir(folder), steps, limit_s, fault,
            processes=processes, errors=errors, life=life,
        )  # fmt: skip
        if code == 0:
            break
    return _ended(folder, code, errors.read_text(), began)


def _ended(folder: Path, code: int, text: str, began: float) -> Ended:
    weights = folder / "weights"
    return Ended(
        code,
        text,
        time.monotonic() - began,
        weights.read_text() if weights.is_file() else "",
        [line for line in read_lines(RunDir(folder).events_path) if line["event"] == "hang"],
    )


def told_after_s(text: str) -> float | None:
    """How long the job had stood still when its watchdog spoke, by its own words."""
    found = re.search(r"no progress for ([\d.]+) s", text)
    return float(found[1]) if found else None
