"""A process that saves in a loop until it is killed, started anew for every line on its stdin.

Run as a program it imports torch once and forks a saver for each order, so that a kill costs
milliseconds and not an import. Orders:

    time SECONDS           kill it from outside after a while
    behind SECONDS         the same while it saves behind its back
    call NUMBER            it kills itself just before its NUMBER-th file operation
    point NAME NUMBER      it saves behind its back and dies at a named place (runtime/files.py)
    ranks NAME NUMBER      two ranks save together, and one of them dies there
"""

import datetime
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from foundling.checkpoint import folders
from foundling.checkpoint.folders import list_checkpoints
from foundling.checkpoint.manager import CheckpointManager
from foundling.checkpoint.retention import latest, retain
from foundling.checkpoint.writer import save
from foundling.config.run import CheckpointConfig
from foundling.runtime import files
from foundling.runtime.dist import World

# Audit events of file operations; fsync has none and is counted by hand.
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "shutil.rmtree"}


def content(step: int) -> dict[str, torch.Tensor]:
    """Tensors that only this step has."""
    g = torch.Generator().manual_seed(step)
    return {f"model.{i}": torch.randn(40, 50, generator=g) for i in range(6)} | {
        "optim.step": torch.tensor(float(step)),
        "optim.half": torch.randn(999, generator=g).bfloat16(),
    }


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_forever(folder: Path, calls_left: int) -> None:
    """Save from the newest whole step on, keeping two; dies at a file operation if told to."""
    newest = latest(folder)
    first = (folders.step_of(newest) or 0) + 1 if newest else 1

    def die_at_call(event: str, _: tuple[object, ...]) -> None:
        nonlocal calls_left
        if event in EVENTS:
            calls_left -= 1
            if calls_left == 0:
                die()

    if calls_left:
        fsync = os.fsync

        def die_at_fsync(descriptor: int) -> None:
            die_at_call("open", ())
            fsync(descriptor)

        os.fsync = die_at_fsync  # type: ignore[assignment]
        sys.addaudithook(die_at_call)
    for step in range(first, first + 1000):
        save(folder, step, content(step), {"step": step})
        retain(folder, CheckpointConfig(keep=2))
    raise SystemExit(f"not killed after {len(list_checkpoints(folder))} checkpoints")


def save_behind(folder: Path, world: World, victim: int, point: str, number: int) -> None:
    """The same with a CheckpointManager, whose tensors are spoilt as soon as they are staged."""
    saver = CheckpointManager(folder, CheckpointConfig(keep=2), world, timeout_s=20)
    newest = saver.latest()
    first = (folders.step_of(newest) or 0) + 1 if newest else 1
    lock = threading.Lock()

    def die_at(here: str) -> None:
        nonlocal number
        if here == point:
            with lock:
                number -= 1
                if number == 0:
                    die()

    if world.rank == victim:
        files.failpoint = die_at
    for step in range(first, first + 1000):
        tensors = content(step)
        saver.save(step, tensors, {"step": step})
        for tensor in tensors.values():
            tensor.fill_(-1)
        if world.size > 1 and any(result.error for result in saver.poll()):
            raise RuntimeError("the other rank is gone")
    raise SystemExit(f"not killed after {len(list_checkpoints(folder))} checkpoints")


def begin(words: list[str], folder: Path, rank: int, world: int, meeting: str) -> None:
    """What a forked process does."""
    if words[0] in ("time", "call"):
        return save_forever(folder, int(words[1]) if words[0] == "call" else 0)
    if words[0] == "behind":
        return save_behind(folder, World(), 0, "", 0)
    if world > 1:
        limit = datetime.timedelta(seconds=30)
        where = f"file://{meeting}"
        dist.init_process_group("gloo", where, limit, world_size=world, rank=rank)
    number = int(words[2])
    victim = 0 if words[1] in ("rename", "delete") else number % world  # rank 0 alone does those
    try:
        return save_behind(folder, World(rank, world), victim, words[1], number)
    except RuntimeError:
        if world > 1 and rank != victim:
            os._exit(0)  # the other one is gone; what a job would do is restart
        raise


def obey(words: list[str], folder: Path, scratch: str, count: int) -> list[int]:
    """Fork, wait, and give the exit codes; negative for a signal."""
    world = 2 if words[0] == "ranks" else 1
    children = []
    for rank in range(world):
        if (child := os.fork()) == 0:
            try:
                begin(words, folder, rank, world, f"{scratch}/meeting-{count}")
            except BaseException:
                traceback.print_exc()
            os._exit(3)
        children.append(child)
    if words[0] in ("time", "behind"):
        time.sleep(float(words[1]))
        os.kill(children[0], signal.SIGKILL)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        # What torch imports late must not be counted.
        save(Path(scratch) / "warm-up", 1, content(1), {})
        for count, order in enumerate(sys.stdin):
            codes = obey(order.split(), folder, scratch, count)
            right = sorted(codes) == [-9, 0] if order.startswith("ranks") else codes == [-9]
            print("killed" if right else f"codes {codes}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
