"""A rank stuck in a sleep, one that skips a collective, one that dies: twenty times of twenty the
watchdog names it in time, torchrun restarts, and the job ends as if nothing had happened."""

import random
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WORK = ROOT / "runs" / "full" / "hangs"
LIMIT_S = 4.0
TIMES = 20
KINDS = ("sleep", "skip", "die")


def hangs() -> dict[str, Any]:
    """A rank that sleeps, skips or dies is named within the limit, and the job ends the same."""
    sys.path.insert(0, str(ROOT / "tests" / "dist"))
    from hang_tools import told_after_s, under_torchrun

    shutil.rmtree(WORK, ignore_errors=True)
    rng = random.Random(5)
    whole = {
        n: under_torchrun(WORK / f"whole-{n}", "none:0:0", processes=n, limit_s=60.0).weights
        for n in (2, 3, 4)
    }
    named: list[str] = []
    waits: list[float] = []
    for number in range(TIMES):
        processes, kind = rng.choice((2, 3, 4)), KINDS[number % len(KINDS)]
        rank, step = rng.randrange(processes), rng.randrange(1, 11)
        fault = f"{kind}:{rank}:{step}"
        folder = WORK / f"{number}-{kind}"
        ended = under_torchrun(folder, fault, processes=processes, limit_s=LIMIT_S)
        assert ended.code == 0, f"{fault} of {processes}: {ended.text[-2000:]}"
        assert ended.weights == whole[processes], f"{fault} of {processes}: other weights"
        odd = [hang["odd"] for hang in ended.hangs]
        assert odd == [[rank]], f"{fault} of {processes}: named {odd}; {ended.text[-2000:]}"
        report = (folder / str(ended.hangs[0]["report"])).read_text()
        assert "stand_in.py" in report, f"{fault} of {processes}: no stack in {report}"
        waited = told_after_s(ended.text)
        if kind != "die":  # that one is told of at once
            assert waited is not None, fault
            assert waited < LIMIT_S, f"{fault}: told after {waited} s"
            waits.append(waited)
        named.append(f"{fault} of {processes}")
        print(f"  {named[-1]}: {ended.hangs[0]['why']}", flush=True)
    return {"times": len(named), "limit_s": LIMIT_S, "slowest_s": max(waits), "faults": named}
