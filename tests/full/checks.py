"""The checks of the full suite: each raises AssertionError or returns its figures."""

import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.full.faults import FAULTS, plant

ROOT = Path(__file__).parents[2]
WORK = ROOT / "runs" / "full"
Figures = dict[str, Any]


def demo() -> Figures:
    """`foundling demo` for seeds 1, 2 and 3: scores and seconds."""
    figures: Figures = {}
    for seed in (1, 2, 3):
        folder = WORK / f"demo-{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        began = time.monotonic()
        words = ["demo", "--seed", str(seed), "--folder", str(folder)]
        subprocess.run([sys.executable, "-m", "foundling.cli", *words], check=True)
        figures[f"seed {seed}"] = _demo_figures(folder, time.monotonic() - began)
        (WORK / f"demo-{seed}.seconds").write_text(str(time.monotonic() - began))
    for name, got in figures.items():
        _check_demo(name, got)
    return figures


def _demo_figures(folder: Path, seconds: float) -> Figures:
    base = json.loads((folder / "pretrain" / "eval.json").read_text())
    chat = json.loads((folder / "finetune" / "eval.json").read_text())
    training = 0.0
    for run in ("pretrain", "finetune"):
        lines = (folder / run / "metrics.jsonl").read_text().splitlines()
        training += sum(json.loads(line)["step_s"] for line in lines)
    quiz = {k: v for k, v in chat["quiz"].items() if k not in ("replies", "by_kind")}
    return {
        "seconds": round(seconds, 1),
        "training_seconds": round(training, 1),
        "bpb": base["bpb"],
        "floor_bpb": base["floor_bpb"],
        "above_floor": base["bpb"] - base["floor_bpb"],
        "above_floor_after_fine_tuning": chat["bpb"] - chat["floor_bpb"],
        "quiz": quiz,
        "exchanges": (folder / "transcript.txt").read_text().count("   you  "),
    }


def _check_demo(name: str, got: Figures) -> None:
    quiz = got["quiz"]
    bars = {
        "12 minutes in all": got["seconds"] <= 720,
        "7 minutes of training": got["training_seconds"] <= 420,
        "400 questions": quiz["n"] >= 400,
        "quiz 95%": quiz["accuracy"] >= 0.95,
        "documents only 90%": quiz["documents_only"] >= 0.90,
        "unknown declined 80%": quiz["unknown_declined"] >= 0.80,
        "known wrongly declined 5%": quiz["known_wrongly_declined"] <= 0.05,
        "0.06 above the floor": got["above_floor"] <= 0.06,
        "floor between 0.2 and 0.6": 0.2 <= got["floor_bpb"] <= 0.6,
        "six exchanges": got["exchanges"] >= 6,
    }
    missed = [bar for bar, met in bars.items() if not met]
    assert not missed, f"{name} misses {', '.join(missed)}: {got}"


def kills() -> Figures:
    """The full demo killed at ten random moments ends bit-identical to the undisturbed one."""
    sys.path.insert(0, str(ROOT / "tests" / "chaos"))
    from compare_runs import assert_same_run, columns
    from killed_demo import run_demo, run_killed

    whole, killed = WORK / "demo-1", WORK / "killed"
    seconds = WORK / "demo-1.seconds"
    if not (whole / "transcript.txt").is_file() or not seconds.is_file():
        seconds.write_text(str(run_demo(whole, "full")))
    shutil.rmtree(killed, ignore_errors=True)
    hits = run_killed(killed, "full", 10, float(seconds.read_text()), random.Random(2))
    for run in ("pretrain", "finetune"):
        assert_same_run(whole / run, killed / run)
    return {
        "kills": 10,
        "hit_alive": hits,
        "steps_compared": sum(len(columns(whole / run)) for run in ("pretrain", "finetune")),
    }


def village() -> Figures:
    """10,000 documents each parse back to exactly one list of choices."""
    from foundling.hamlet import Village, derive, parse

    figures: Figures = {"documents": 0, "ambiguous": 0, "wrong": 0}
    for seed in (1, 2, 3, 4):
        home = Village(seed)
        for index in range(2500):
            text, derivation = derive(home, seed, index)
            found = parse(home, text)
            figures["documents"] += 1
            figures["ambiguous"] += len(found) != 1
            figures["wrong"] += derivation not in found
    assert not figures["ambiguous"]
    assert not figures["wrong"], figures
    return figures


def faults() -> Figures:
    """Every planted fault of docs/faults.md makes a test fail."""
    caught: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for fault in FAULTS:
            copy = plant(fault, ROOT, Path(scratch) / fault.name.replace(" ", "-"))
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
            done = subprocess.run(
                [*command, *fault.tests], cwd=copy, capture_output=True, text=True, timeout=600
            )
            failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
            assert done.returncode == 1, f"{fault.name}: not caught\n{done.stdout[-1500:]}"
            assert failed, f"{fault.name}: {done.stdout[-1500:]}"
            caught[fault.name] = failed[0].split()[1]
            print(f"  {fault.name}: {caught[fault.name]}", flush=True)
            shutil.rmtree(copy)
    return {"planted": len(FAULTS), "caught": caught}


def fresh_clone() -> Figures:
    """`make test` from a fresh clone in a new folder, with its own environment."""
    with tempfile.TemporaryDirectory() as scratch:
        clone = Path(scratch) / "foundling"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        began = time.monotonic()
        subprocess.run(["make", "check"], cwd=clone, check=True, stdout=subprocess.DEVNULL)
        installed = time.monotonic() - began
        done = subprocess.run(["make", "test"], cwd=clone, capture_output=True, text=True)
        seconds = time.monotonic() - began - installed
        assert done.returncode == 0, done.stdout[-3000:]
        last = [line for line in done.stdout.splitlines() if " passed" in line][-1]
    assert seconds < 600, f"make test took {seconds:.0f} s"
    return {
        "install_and_check_seconds": round(installed),
        "test_seconds": round(seconds),
        "summary": last.strip("= "),
        "coverage": next(
            (line.split()[-1] for line in done.stdout.splitlines() if line.startswith("TOTAL")), ""
        ),
    }


CHECKS: dict[str, Callable[[], Figures]] = {
    "demo": demo,
    "kills": kills,
    "village": village,
    "faults": faults,
    "fresh_clone": fresh_clone,
}
