"""Reading run directories at full size: the report of a run of a million steps, a list of 1,000."""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foundling.config.load import dump_yaml
from foundling.config.presets import hamlet
from foundling.runtime.run_dir import RunDir

ROOT = Path(__file__).parents[2]
STEPS = 1_000_000
RUNS, STEPS_OF_EACH = 1_000, 10_000
REPORT_S, REPORT_BYTES = 20.0, 500e6
LIST_S = 2.0
TOKENS = 524_288


def run_reader() -> dict[str, Any]:
    """`report` of a million steps within 20 s and 500 MB; `runs list` of 1,000 runs within 2 s."""
    with tempfile.TemporaryDirectory() as scratch:
        long = write_run(Path(scratch) / "long", STEPS)
        report_s, report_bytes = _command("report", str(long.path))
        page = long.report_path.read_text()
        assert "1,000,000 steps" in page, "the page does not tell the run's steps"
        folder = Path(scratch) / "many"
        first = write_run(folder / "run-0000", STEPS_OF_EACH)
        for number in range(1, RUNS):
            copied(first, folder / f"run-{number:04}")
        list_s, list_bytes = _command("runs", "list", str(folder))
    figures = {
        "report steps": STEPS,
        "report seconds": round(report_s, 2),
        "report peak bytes": report_bytes,
        "listed runs": RUNS,
        "list seconds": round(list_s, 2),
        "list peak bytes": list_bytes,
        "load average": round(os.getloadavg()[0], 1),
    }
    bars = {
        f"report within {REPORT_S:g} s": report_s <= REPORT_S,
        f"report within {REPORT_BYTES / 1e6:g} MB": report_bytes <= REPORT_BYTES,
        f"list within {LIST_S:g} s": list_s <= LIST_S,
    }
    missed = [bar for bar, met in bars.items() if not met]
    assert not missed, f"missed: {', '.join(missed)}: {figures}"
    return figures


def write_run(folder: Path, steps: int) -> RunDir:
    """A run of one source with a line a step, each as wide as the trainer writes it."""
    run = RunDir(folder)
    run.path.mkdir(parents=True)
    run.config_path.write_text(dump_yaml(hamlet()))
    run.write_info({"chat": False, "status": "finished", "parent": None})
    with open(run.metrics_path, "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in _metrics(steps))
    for step in range(1, 11):
        run.checkpoints.joinpath(f"step-{step:08}").mkdir(parents=True)
    return run


def copied(run: RunDir, folder: Path) -> None:
    """The same run in another folder, its large files by a second name."""
    other = RunDir(folder)
    for step in run.checkpoints.iterdir():
        other.checkpoints.joinpath(step.name).mkdir(parents=True)
    for path in (run.config_path, run.info_path, run.metrics_path):
        os.link(path, other.path / path.name)


def _metrics(steps: int) -> Iterator[dict[str, Any]]:
    chance = random.Random(1)
    counts = {"units": 256, "positions": TOKENS, "tokens": TOKENS - 100, "targets": TOKENS - 356}
    for step in range(1, steps + 1):
        yield {
            "step": step,
            "loss": 2 + 8 / step + chance.random() / 10,
            "lr": 1e-3 * (1 - step / (steps + 1)),
            "grad_norm": 1 + chance.random(),
            "update_ratio": chance.random() / 1000 if step % 10 == 0 else None,
            "seq_len": 2048.0,
            "positions": TOKENS,
            "tokens": TOKENS - 100,
            "targets": TOKENS - 356,
            "total_tokens": (TOKENS - 100) * step,
            "non_padding": 1 - 100 / TOKENS,
            "tokens_per_s": round(6e5 + 1e4 * chance.random(), 1),
            "matmul_share": 0.5311,
            "mfu": 0.4123,
            "step_s": round(0.85 + chance.random() / 100, 5),
            "data_wait_s": 5e-05,
            "memory_allocated": 80_466_493_440,
            "memory_reserved": 90_466_493_440,
            "memory_peak": 85_466_493_440,
            "memory_peak_reserved": 90_466_493_440,
            "sources": {"data/web": {**counts, "epochs": round(step * 1e-7, 9)}},
        }


_MEASURE = """
import json, os, subprocess, sys, time
began = time.monotonic()
child = subprocess.Popen([sys.executable, "-m", "foundling", *sys.argv[1:]], stdout=sys.stderr)
_, status, used = os.wait4(child.pid, 0)
print(json.dumps([status, time.monotonic() - began, used.ru_maxrss * 1024]))
"""


def _command(*words: str) -> tuple[float, int]:
    """Seconds of a whole command that must succeed, and the most memory that it held. A small
    process starts it: what the starting one holds is counted as its child's."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    status, seconds, most = json.loads(done.stdout)
    assert status == 0, (
        f"foundling {' '.join(words)} ended with {os.waitstatus_to_exitcode(status)}"
    )
    return seconds, most
