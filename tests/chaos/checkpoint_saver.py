"""A process that saves in a loop until it is killed, started anew for every line on its stdin.

Run as a program it imports torch once and forks a saver for each order, so that a kill costs
milliseconds and not an import. An order is `time SECONDS` (kill from outside after a while) or
`call NUMBER` (the saver kills itself just before its NUMBER-th file operation).
"""

import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from foundling.checkpoint import folders, latest, list_checkpoints, retain, save

# Audit events of file operations; fsync has none and is counted by hand.
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "shutil.rmtree"}


def content(step: int) -> dict[str, torch.Tensor]:
    """Tensors that only this step has."""
    g = torch.Generator().manual_seed(step)
    return {f"model.{i}": torch.randn(40, 50, generator=g) for i in range(6)} | {
        "optim.step": torch.tensor(float(step)),
        "optim.half": torch.randn(999, generator=g).bfloat16(),
    }


def save_forever(folder: Path, calls_left: int, ready: int) -> None:
    """Save from the newest whole step on, keeping two; dies at a file operation if told to."""
    newest = latest(folder)
    first = (folders.step_of(newest) or 0) + 1 if newest else 1

    def die_at_call(event: str, _: tuple[object, ...]) -> None:
        nonlocal calls_left
        if event in EVENTS:
            calls_left -= 1
            if calls_left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    if calls_left:
        fsync = os.fsync

        def die_at_fsync(descriptor: int) -> None:
            die_at_call("open", ())
            fsync(descriptor)

        os.fsync = die_at_fsync  # type: ignore[assignment]
        sys.addaudithook(die_at_call)
    os.write(ready, b"x")
    for step in range(first, first + 1000):
        save(folder, step, content(step), {"step": step})
        retain(folder, 2)
    raise SystemExit(f"not killed after {len(list_checkpoints(folder))} checkpoints")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as warm_up:  # what torch imports late must not be counted
        save(Path(warm_up), 1, content(1), {})
    for order in sys.stdin:
        kind, amount = order.split()
        waiting, ready = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_forever(folder, int(amount) if kind == "call" else 0, ready)
            except BaseException:
                traceback.print_exc()
            os._exit(3)
        os.close(ready)
        os.read(waiting, 1)
        os.close(waiting)
        if kind == "time":
            time.sleep(float(amount))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        print("killed" if os.WIFSIGNALED(status) else f"status {status}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
