"""200 x kill -9 of the real training command: nothing saved is lost, and the run ends the same.
(`KILLS=50 make test-full ONLY=run_kills`: a quarter of them in a quarter of an hour.)"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.full.tiny_runs import ROOT, build_data, flags, foundling

sys.path.insert(0, str(ROOT / "tests" / "chaos"))

from killed_runs import NAMES, POINTS, Killed, Order, assert_undisturbed, orders_of

KILLS = int(os.environ.get("KILLS", "200"))
AT_EACH = KILLS // 12
AT_RANDOM = KILLS - AT_EACH * len(POINTS)
STEPS, LONGEST_S = 1200, 3.0
"""Steps of a run, several of which are killed one after another; a random instant comes so many
seconds after a start, or after the first step, at most."""
OFTEN = {"checkpoint.every": "5", "eval.every": "10", "eval.tokens": "1024"}
WORK = ROOT / "runs" / "full" / "run_kills"


def run_kills() -> dict[str, Any]:
    """200 x kill -9 of launcher, torchrun, a rank or all: the last save stands, the same run."""
    orders = orders_of(3, AT_EACH, AT_RANDOM, LONGEST_S)
    words, done = _prepared(), _Progress(WORK / "done.jsonl")
    began, earlier = time.monotonic(), len(done.lines)
    while len(done.lines) < len(orders):
        _one_run(words, orders, done)
    if not (WORK / "whole" / "run.json").is_file() or not done.compared:
        raise AssertionError("no run was compared")
    by_point = Counter(line["where"] for line in done.lines)
    assert all(by_point[point] >= AT_EACH for point in POINTS), by_point
    assert len(done.lines) >= KILLS, len(done.lines)
    return {
        "kills": len(done.lines),
        "whom": dict(Counter(line["whom"] for line in done.lines)),
        "where": dict(by_point),
        "whom_and_where": dict(Counter(f"{x['whom']}: {x['where']}" for x in done.lines)),
        "saves_lost": 0,
        "runs": len(done.compared),
        "steps_of_a_run": STEPS,
        "lives": sum(run["lives"] for run in done.compared),
        "evaluations_left_out": sum(run["evaluations_left_out"] for run in done.compared),
        "seconds_a_kill": round((time.monotonic() - began) / max(1, len(orders) - earlier), 1),
    }


class _Progress:
    """What was done so far, by file: the check can be interrupted and continued."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines: list[dict[str, Any]] = []
        self.compared: list[dict[str, Any]] = []
        for text in path.read_text().splitlines() if path.is_file() else ():
            line = json.loads(text)
            (self.compared if "lives" in line else self.lines).append(line)

    def note(self, **line: Any) -> None:
        """One kill, or one run that was compared."""
        (self.compared if "lives" in line else self.lines).append(line)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _prepared() -> list[str]:
    """The command; data and the undisturbed run are made unless this commit has made them, for as
    many kills."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    mark, text = WORK / "commit", WORK / "text"
    wanted = f"{commit.stdout.strip()}, {KILLS} kills\n"  # another number, another list of orders
    if not mark.is_file() or mark.read_text() != wanted:
        shutil.rmtree(WORK, ignore_errors=True)
        WORK.mkdir(parents=True)
        build_data(WORK)
    words = ["train", "hamlet", "--nproc", "2", *flags(text, STEPS)]
    for name, value in OFTEN.items():
        words[words.index(f"--{name}") + 1] = value
    if not mark.is_file():
        foundling(*words, "--run", str(WORK / "whole"))
        mark.write_text(wanted)
    return words


def _one_run(words: list[str], orders: list[Order], done: _Progress) -> None:
    """Kill one run until it is finished or nothing is left to be done, and compare it."""
    run = WORK / f"killed-{len(done.compared)}"
    killed = Killed(run, words)
    while len(done.lines) < len(orders):
        order = orders[len(done.lines)]
        if not killed.kill(order):
            break  # the run has ended before it: the next one is killed so
        done.note(whom=NAMES[order.whom], where=order.where, saved=killed.seen[-1][1])
        print(f"  {len(done.lines)}: {NAMES[order.whom]}, {order.where}, saved at"
              f" {killed.seen[-1][1]}", flush=True)  # fmt: skip
    killed.finish()
    left_out = assert_undisturbed(WORK / "whole", run)
    done.note(lives=killed.assert_taken_up(), evaluations_left_out=left_out, run=run.name)
    print(f"  {run.name}: the same as the undisturbed run", flush=True)
