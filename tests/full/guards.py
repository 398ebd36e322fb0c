"""Bad batches under the real command line: left out or gone back from, recorded, and replayed."""

import random
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.full.tiny_runs import ROOT, build_data, flags

sys.path.insert(0, str(ROOT / "tests" / "chaos"))

from guarded_runs import KINDS, NONFINITE, SAVE_EVERY, Case, check_case

SEEDS, PROCESSES, KILLS = (1, 2, 3), (1, 2), 3
STEPS = 50


def guards() -> dict[str, Any]:
    """A NaN, several in a row, a spike; seeds, processes: left out or gone back, and replayed."""
    home = ROOT / "runs" / "full" / "guards"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    text = build_data(home)
    done: Counter[str] = Counter()
    told: dict[str, Any] = {}
    for processes in PROCESSES:
        for seed in SEEDS:
            for kind in KINDS:
                case = Case(
                    kind, seed, processes, random.Random(f"{kind} {seed}").randrange(22, 36)
                )
                words = _words(text, seed)
                found = check_case(case, home / case.name, words, KILLS)
                told[case.name] = found["record"]
                done.update(found["counts"])
                print(f"  {case.name}: {found['record']}", flush=True)
    return {
        "cases": len(told),
        "steps": STEPS,
        "saved_every": SAVE_EVERY,
        "nonfinite": NONFINITE,
        **done,
        "interventions": told,
    }


def _words(text: Path, seed: int) -> list[str]:
    return ["train", "hamlet", *flags(text, STEPS), "--train.seed", str(seed)]
