"""One bad batch, or a few, in a real run: what the guard must do, record and do again."""

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from killed_runs import ARMED, ROOT, Killed, Order, assert_undisturbed

from foundling.checkpoint.manifest import load_meta
from foundling.checkpoint.retention import latest
from foundling.runtime.run_dir import RunDir, read_lines
from foundling.runtime.run_reader import read_events
from foundling.train.faults.anomaly import SKIP_BEFORE

NONFINITE, SAVE_EVERY = 3, 5
WINDOW = {"TEST_WINDOW": "16", "TEST_ALONE": "1"}
SETTINGS = {
    "guard.nonfinite": str(NONFINITE),
    "guard.spike-loss": "12",
    "guard.spike-norm": "12",
    "checkpoint.every": str(SAVE_EVERY),
    "eval.every": "10",
    "eval.tokens": "1024",
}
KINDS = ("a NaN", "NaNs in a row", "a spike")


@dataclass(frozen=True)
class Case:
    """A kind of fault and the batch it begins with."""

    kind: str
    seed: int
    processes: int
    batch: int

    @property
    def name(self) -> str:
        """For a folder and a table."""
        return f"{self.kind}, seed {self.seed}, {self.processes} processes".replace(" ", "-")

    @property
    def planted(self) -> str:
        """The order for tests/chaos/armed."""
        if self.kind == "NaNs in a row":
            return ",".join(f"nan:{self.batch + number}" for number in range(NONFINITE))
        return f"{'nan' if self.kind == 'a NaN' else 'spike'}:{self.batch}"

    def wanted(self) -> list[tuple[str, list[int], int | None]]:
        """What docs/guard.md promises: (what, batches left out, step gone back to)."""
        # Up to its first fault a run reads batch number s in step s.
        saved = self.batch // SAVE_EVERY * SAVE_EVERY
        first = max(self.batch - SKIP_BEFORE, saved)
        if self.kind == "a spike":
            return [("spike", [first, self.batch + 1], saved)]
        count = 1 if self.kind == "a NaN" else NONFINITE - 1
        single = [("nonfinite", [b, b + 1], None) for b in range(self.batch, self.batch + count)]
        if self.kind == "a NaN":
            return list(single)
        return [*single, ("nonfinite", [first, self.batch + NONFINITE], saved)]


def check_case(case: Case, home: Path, words: list[str], kills: int) -> dict[str, Any]:
    """Train with the fault; without it but told what to leave out; and with it, killed: all three
    must be the same run."""
    home.mkdir(parents=True)
    words = [*words, *(["--nproc", str(case.processes)] if case.processes > 1 else [])]
    for name, value in SETTINGS.items():
        if f"--{name}" in words:
            words[words.index(f"--{name}") + 1] = value
        else:
            words += [f"--{name}", value]
    faulty, clean = home / "faulty", home / "clean"
    train([*words, "--run", str(faulty)], TEST_PLANT=case.planted, **WINDOW)
    record = check_record(case, faulty)
    clean.mkdir()
    plant_record(faulty, clean)
    train([*words, "--run", str(clean)], **WINDOW)
    assert_undisturbed(clean, faulty)
    killed = Killed(home / "killed", words, TEST_PLANT=case.planted, **WINDOW)
    struck = strike(killed, case, kills)
    assert_undisturbed(faulty, killed.run)
    assert check_record(case, killed.run) == record
    rolled = sum(back is not None for _, _, back in record)
    counts = {"left_out": len(record) - rolled, "rolled_back": rolled, "kills": struck, "runs": 3}
    return {"record": record, "counts": counts}


def strike(killed: Killed, case: Case, kills: int) -> int:
    """Kill a run before, around and after its fault, in the middle of a step; then let it end."""
    chance, struck = random.Random(case.name), 0
    # Passings of a life: it begins where the last save was, so these fall at and near the fault.
    for number in (case.batch + 1, *(chance.randint(1, 8) for _ in range(kills - 1))):
        whom = chance.choice(("self", "launcher", "agent", "all")) if case.processes > 1 else "self"
        struck += killed.kill(Order(whom, chance.randrange(case.processes), "gradients", number))
    killed.finish()
    return struck


def check_record(case: Case, run: Path) -> list[tuple[str, list[int], int | None]]:
    """Events, ledger and checkpoint tell the same story, which is the promised one."""
    events = read_events(RunDir(run)).record
    found = [(one["what"], one["skipped"], one["back_to"]) for one in events]
    assert found == case.wanted(), f"{case.name}: {found}, and not {case.wanted()}"
    assert [line["number"] for line in events] == list(range(len(events)))
    for event in events:
        assert [s["batch"] for s in event["samples"]] == list(range(*event["skipped"]))
    first, last = min(one[1][0] for one in found), max(one[1][1] for one in found)
    ledger = read_lines(run / "metrics.jsonl")
    (rows,) = {sum(s["units"] for s in line["sources"].values()) for line in ledger}
    left = {line["step"]: sum(line["skipped"].values()) for line in ledger if "skipped" in line}
    assert left == {first + 1: rows * (last - first)}, left
    newest = latest(run / "checkpoints")
    assert newest is not None
    assert load_meta(newest)["guard"]["skips"] == [[first, last]]
    return found


def plant_record(known: Path, run: Path) -> None:
    """Let a run that has not begun know what the guard of another has done."""
    events = read_events(RunDir(known)).record
    (run / "lock").touch()  # as a start leaves it that was cut off before run.json
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def train(words: list[str], **more: str) -> None:
    """The command, which must succeed."""
    path = f"{ARMED}{os.pathsep}{ROOT}"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **WINDOW, **more}
    command = [sys.executable, "-m", "foundling", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout[-1000:]} {done.stderr[-3000:]}"
