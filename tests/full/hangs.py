"""A rank stuck in a sleep, one that skips a collective, one that dies: twenty times of twenty the
watchdog names it in time, torchrun restarts, and the run ends as if nothing had happened."""

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.full.tiny_runs import build_data, flags

ROOT = Path(__file__).parents[2]
WORK = ROOT / "runs" / "full" / "hangs"
FAULTY = ROOT / "tests" / "dist" / "faulty_train.py"
LIMIT_S, STEPS, TIMES = 6.0, 24, 20
KINDS = ("sleep", "skip", "die", "idle")


def hangs() -> dict[str, Any]:
    """A rank that sleeps, skips or dies is named within the limit, and the run ends the same."""
    from foundling.runtime.run_dir import read_lines

    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    text, rng = build_data(WORK), random.Random(5)
    whole = {n: _run(WORK / f"whole-{n}", text, "none:0:0", n)[0] for n in (2, 3, 4)}
    named: list[str] = []
    waits: list[float] = []
    for number in range(TIMES):
        processes, kind = rng.choice((2, 3, 4)), KINDS[number % len(KINDS)]
        rank, step = rng.randrange(processes), rng.randrange(1, STEPS - 1)
        fault, folder = f"{kind}:{rank}:{step}", WORK / f"{number}-{kind}"
        lines, text_of = _run(folder, text, fault, processes)
        assert lines == whole[processes], f"{fault} of {processes}: another run"
        events = [line for line in read_lines(folder / "events.jsonl") if line["event"] == "hang"]
        culprits = [event["culprit"] for event in events]
        assert culprits == [[rank]], f"{fault} of {processes}: named {culprits}; {text_of[-2000:]}"
        report = (folder / events[0]["report"]).read_text()
        assert "train/loop.py" in report, f"{fault} of {processes}: no stack in {report}"
        told = re.search(r"no progress for ([\d.]+) s", report)
        if kind in ("sleep", "idle"):  # the others are told of when a process is gone
            assert told is not None, report
        if told is not None:
            waits.append(float(told[1]))
            assert waits[-1] < LIMIT_S, f"{fault}: told after {waits[-1]} s"
        named.append(f"{fault} of {processes}")
        print(f"  {named[-1]}: {events[0]['why']}", flush=True)
    return {"times": len(named), "limit_s": LIMIT_S, "slowest_s": max(waits), "faults": named}


def _run(folder: Path, text: Path, fault: str, processes: int) -> tuple[list[Any], str]:
    """One run with restarts: what each of its steps came to, and what was written to stderr."""
    from foundling.runtime.run_dir import read_lines

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "2"]
    command += ["--monitor-interval", "0.1", "--nproc-per-node", str(processes), str(FAULTY), fault]
    words = flags(text, STEPS)
    words[words.index("--checkpoint.every") + 1] = "5"
    command += ["train", "hamlet", "--run-dir", str(folder), *words, "--guard.hang-s", str(LIMIT_S)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        # Stale keys of the life before make a restarted gloo job hang.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{fault} of {processes}: {done.stderr[-3000:]}"
    names = ("step", "loss", "grad_norm", "tokens", "sources")
    lines = read_lines(folder / "metrics.jsonl")
    return [[line[name] for name in names] for line in lines], done.stderr
