"""The checks of the full suite: each raises AssertionError or returns its figures."""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foundling.runtime.run_dir import RunDir
from foundling.runtime.run_reader import final_scores
from tests.full.building import build_kills, build_memory, building
from tests.full.checkpoints import (
    checkpoint_damage,
    checkpoint_full_disk,
    checkpoint_kills,
    hostile,
)
from tests.full.compare import calibration
from tests.full.convert import convert, exported_demo
from tests.full.core import core
from tests.full.data_trust import bench_data, damage
from tests.full.faults import FAULTS
from tests.full.guards import guards
from tests.full.hangs import hangs
from tests.full.layouts import layouts
from tests.full.lm_eval import lm_eval
from tests.full.loading import loading
from tests.full.planting import plant
from tests.full.run_kills import run_kills
from tests.full.run_reader import run_reader
from tests.full.serving import server_overhead, serving
from tests.full.signals import signals
from tests.full.slurm import slurm
from tests.full.tokenizers import tokenizers

ROOT = Path(__file__).parents[2]
WORK = ROOT / "runs" / "full"
Figures = dict[str, Any]


def demo() -> Figures:
    """`make demo` from a fresh clone, installation included, then seeds 2 and 3."""
    clone = _clone(WORK / f"clone-{_commit()[:12]}")
    figures: Figures = {}
    for seed in (1, 2, 3):
        folder, done = clone / "runs" / f"demo-{seed}", clone / f"seed-{seed}.json"
        if not done.is_file():  # a seed that was interrupted begins again, for an honest time
            shutil.rmtree(folder, ignore_errors=True)
            began = time.monotonic()
            subprocess.run(["make", "demo", f"SEED={seed}"], cwd=clone, check=True)
            done.write_text(json.dumps(_demo_figures(folder, time.monotonic() - began)))
        figures[f"seed {seed}"] = json.loads(done.read_text())
    for name, got in figures.items():
        _check_demo(name, got)
    return figures


def _clone(folder: Path) -> Path:
    if not folder.is_dir():
        subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    return folder


def _commit() -> str:
    words = ["git", "rev-parse", "HEAD"]
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def _demo_figures(folder: Path, seconds: float) -> Figures:
    base = final_scores(RunDir(folder / "pretrain"))
    chat = final_scores(RunDir(folder / "finetune"))
    times = [json.loads(line) for line in (folder / "times.jsonl").read_text().splitlines()]
    # The whole of the two train commands: set-up, saves, evaluations and samples included.
    training = sum(t["seconds"] for t in times if t["step"] in ("pretraining", "fine-tuning"))
    quiz = {k: v for k, v in chat["quiz"].items() if k not in ("replies", "by_kind")}
    return {
        "seconds": round(seconds, 1),
        "training_seconds": round(training, 1),
        "bpb": base["full_bpb"],
        "floor_bpb": base["full_floor_bpb"],
        "above_floor": base["full_bpb"] - base["full_floor_bpb"],
        "above_floor_after_fine_tuning": chat["full_bpb"] - chat["full_floor_bpb"],
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
    """The full demo killed ten times ends bit-identical to the undisturbed one."""
    sys.path.insert(0, str(ROOT / "tests" / "chaos"))
    from compare_runs import assert_same_run, columns
    from killed_demo import run_killed

    clone = WORK / f"clone-{_commit()[:12]}"
    assert (clone / "seed-1.json").is_file(), "run the check `demo` first"
    whole, killed = clone / "runs" / "demo-1", WORK / "killed"
    seconds = json.loads((clone / "seed-1.json").read_text())["seconds"]
    shutil.rmtree(killed, ignore_errors=True)
    hits = run_killed(killed, "full", 10, seconds, random.Random(2))
    for run in ("pretrain", "finetune"):
        assert_same_run(whole / run, killed / run)
    assert hits == 10, f"only {hits} of 10 kills hit a living demo"
    steps = sum(len(columns(whole / run)) for run in ("pretrain", "finetune"))
    return {"kills": hits, "steps_compared": steps}


def marked() -> Figures:
    """The tests marked `full`: among them 10,000 documents that each parse back in one way."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "full", "-o", "addopts=", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    return {"summary": done.stdout.strip().splitlines()[-1]}


def faults() -> Figures:
    """Every planted fault of docs/faults.md makes a test fail."""
    caught: dict[str, str] = {}
    paths = [path for path in [os.environ.get("PYTHONPATH")] if path]
    with tempfile.TemporaryDirectory() as scratch:
        for fault in FAULTS:
            copy = plant(fault, ROOT, Path(scratch) / fault.name.replace(" ", "-"))
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
            done = subprocess.run(
                [*command, *fault.tests],
                cwd=copy,
                # The commands that tests start must find the fault too.
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(copy), *paths])},
                capture_output=True,
                text=True,
                timeout=1200,
            )
            failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
            assert done.returncode == 1, f"{fault.name}: not caught\n{done.stdout[-1500:]}"
            assert failed, f"{fault.name}: {done.stdout[-1500:]}"
            caught[fault.name] = failed[0].split()[1]
            print(f"  {fault.name}: {caught[fault.name]}", flush=True)
            shutil.rmtree(copy)
    return {"planted": len(FAULTS), "caught": caught}


def fresh_clone() -> Figures:
    """`make test` from a fresh clone in a new folder, installation included."""
    with tempfile.TemporaryDirectory() as scratch:
        clone = _clone(Path(scratch) / "foundling")
        began = time.monotonic()
        done = subprocess.run(["make", "test"], cwd=clone, capture_output=True, text=True)
        seconds = time.monotonic() - began
        assert done.returncode == 0, done.stdout[-3000:]
        lines = done.stdout.splitlines()
    assert seconds < 600, f"make test took {seconds:.0f} s"
    return {
        "seconds": round(seconds),
        "summary": [line for line in lines if " passed" in line][-1].strip("= "),
        "coverage": next(line.split()[-1] for line in lines if line.startswith("TOTAL")),
    }


CHECKS: dict[str, Callable[[], Figures]] = {
    "demo": demo,
    "kills": kills,
    "marked": marked,
    "hangs": hangs,
    "checkpoint_kills": checkpoint_kills,
    "checkpoint_damage": checkpoint_damage,
    "checkpoint_full_disk": checkpoint_full_disk,
    "hostile": hostile,
    "signals": signals,
    "layouts": layouts,
    "run_kills": run_kills,
    "guards": guards,
    "slurm": slurm,
    "faults": faults,
    "fresh_clone": fresh_clone,
    "building": building,
    "build_memory": build_memory,
    "build_kills": build_kills,
    "loading": loading,
    "damage": damage,
    "bench_data": bench_data,
    "tokenizers": tokenizers,
    "convert": convert,
    "exported_demo": exported_demo,
    "compare": calibration,
    "lm_eval": lm_eval,
    "core": core,
    "run_reader": run_reader,
    "serving": serving,
    "server_overhead": server_overhead,
}
