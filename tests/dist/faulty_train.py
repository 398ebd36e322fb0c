"""`foundling train` with one fault planted in its first life: FAULT:RANK:STEP, then its arguments.

sleep, skip, die   the rank hangs, leaves a collective out, is killed
idle               the rank hangs between two steps, before one asks whether to stop
nan, spike         the rank's gradients come out wrong, once
"""

import os
import signal
import sys
import time
from typing import Any

from foundling.train import loop, step
from foundling.train.faults.anomaly import AnomalyGuard

FACTORS = {"nan": float("nan"), "spike": 1e-3}


def plant(kind: str, rank: int, at: int) -> None:
    """Do it once, in the given step of the given rank."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" or int(os.environ["RANK"]) != rank:
        return
    real_step, real_sum, real_add = loop.train_step, step.sum_over_ranks, step._accumulate
    real_watch, due = AnomalyGuard.watch, list[str]()

    def train_step(state: Any, *args: Any, **more: Any) -> Any:
        nonlocal kind
        due[:] = [kind] if state.step == at else []
        kind = "" if due and kind != "idle" else kind
        if due == ["sleep"]:
            time.sleep(600)
        if due == ["die"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return real_step(state, *args, **more)

    def sum_over_ranks(tensor: Any, name: str = "sum") -> Any:
        return tensor if due == ["skip"] and name == "loss" else real_sum(tensor, name)

    def accumulate(state: Any, batches: Any, targets: Any, *rest: Any) -> Any:
        factor = FACTORS.get("".join(due), 1)
        return real_add(state, batches, targets * factor if factor != 1 else targets, *rest)

    def watch(self: AnomalyGuard, state: Any) -> None:
        real_watch(self, state)
        if kind == "idle" and state.step == at:
            time.sleep(600)

    AnomalyGuard.watch = watch  # type: ignore[method-assign]
    loop.train_step = train_step  # type: ignore[assignment]
    step.sum_over_ranks = sum_over_ranks  # type: ignore[attr-defined]
    step._accumulate = accumulate


if __name__ == "__main__":
    fault, place, at = sys.argv[1].split(":")
    plant(fault, int(place), int(at))
    sys.argv = ["foundling", *sys.argv[2:]]
    from foundling.cli.main import main

    main()
