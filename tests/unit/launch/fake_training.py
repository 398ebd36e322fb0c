"""A training that has no model: steps, saves, ranks that agree, and faults on demand.

    python -m fake_training RUN --steps 100 [--agree] [--fault KIND:RANK:STEP] ...

It uses the house's signals, exits and lock as the real loop does; what it "learns" is the number of
steps, so a lost or repeated one shows.
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from foundling.config.errors import RunError
from foundling.runtime.exits import EndOfRun, Exit, write_outcome
from foundling.runtime.lock import RunLock
from foundling.runtime.processes import defer_signals, handle_signals, stop_requested


class Alone:
    """A world of one, without torch."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ.get("RANK", "0")), 1


def newest(run: Path) -> int:
    return max((int(p.name[5:]) for p in run.glob("checkpoints/step-*")), default=0)


def save(run: Path, step: int, rank: int) -> None:
    if rank == 0:
        (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)


def fault(words: list[str], run: Path, rank: int, step: int) -> None:
    for word in words:
        kind, at_rank, at_step = word.split(":")
        if (rank, step) != (int(at_rank), int(at_step)):
            continue
        mark = run / f"fault-{kind}-{at_rank}-{at_step}"
        if kind not in ("user", "hang") and mark.exists():
            continue
        mark.touch()
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "parent":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)
        if kind == "crash":
            raise ValueError("planted")
        if kind == "hang":
            raise EndOfRun(Exit.WATCHDOG, "rank 0 stands still")
        if kind == "user":
            raise RunError("planted mistake; repair it.")
        if kind == "deaf":
            time.sleep(1000)


def train(options: argparse.Namespace) -> None:
    run, reason = options.run, None
    with contextlib.ExitStack() as stack:
        stack.enter_context(handle_signals(options.stop_after))
        world = Alone()
        if options.agree:
            import torch

            from foundling.runtime.dist import process_group, world_from_environment

            world = world_from_environment()
            stack.enter_context(process_group(world, torch.device("cpu"), timeout_s=60))
        if world.rank == 0:
            stack.enter_context(RunLock(run))
        step = newest(run)
        defer_signals()
        print(f"rank {world.rank} begins at step {step}", flush=True)
        while step < options.steps and reason is None:
            fault(options.fault, run, world.rank, step)
            time.sleep(options.pace)
            step += 1
            if step % options.every == 0:
                save(run, step, world.rank)
            reason = stop_requested(world)
        save(run, step, world.rank)
    if reason:
        raise EndOfRun(Exit.REQUEUE, f"saved at step {step} after {reason}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--pace", type=float, default=0.02)
    parser.add_argument("--agree", action="store_true")
    parser.add_argument("--stop-after", type=float, default=0.0)
    parser.add_argument("--fault", action="append", default=[])
    code, sentence = 0, ""
    try:
        train(parser.parse_args())
    except EndOfRun as end:
        code, sentence = end.code, str(end)
    except RunError as error:
        code, sentence = error.exit_code, str(error)
    print(f"ends with {code}: {sentence}", flush=True)
    write_outcome(code, sentence)
    sys.exit(code)


if __name__ == "__main__":
    main()
