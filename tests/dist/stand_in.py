"""A small training under a watchdog, with one fault planted in its first life.

    torchrun ... tests/dist/stand_in.py RUN STEPS LIMIT_S FAULT:RANK:STEP

It has what a real run has for a watchdog to see: collectives with names, DDP's own inside the
backward pass, phases, checkpoints, a handler for SIGTERM that only notes it. At its end rank 0
writes the weights' hash, which must be that of a run without a fault.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from foundling.train.faults import watchdog
from foundling.runtime.dist import combine_on_main
from foundling.runtime.dist import scatter_from_main
from foundling.runtime.dist import on_main
from foundling.runtime.dist import max_over_ranks
from foundling.config.run import GuardConfig
from foundling.runtime.run_dir import RunDir
from foundling.runtime.dist import World
from foundling.runtime.dist import process_group
from foundling.runtime.dist import sum_over_ranks
from foundling.runtime.dist import world_from_environment
from foundling.runtime.progress import PROGRESS
from foundling.runtime.progress import collective
from foundling.runtime.processes import defer_signals
from foundling.runtime.processes import handle_signals
from foundling.runtime.processes import stop_requested
from foundling.train.faults.replicas import hash_of
from foundling.train.faults.watchdog import FIRST_CHECKS_S
from foundling.train.faults.watchdog import Watchdog

SAVE_EVERY = 4


def main(run: RunDir, steps: int, limit_s: float, fault: str) -> None:
    world = world_from_environment()
    signal.signal(signal.SIGTERM, lambda *_: None)
    torch.set_num_threads(1)
    watchdog.HANG_SLOW_S = 20.0
    config = GuardConfig(hang_s=limit_s)
    with Watchdog(run, world, config) as dog, process_group(world, torch.device("cpu"), timeout_s=60):
        if world.is_main and (told := dog.report_previous_death()):
            print(told, file=sys.stderr)
        train(run, steps, world, fault)


def train(run: RunDir, steps: int, world: World, fault: str) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # DDP lays its buckets out anew after the first backward pass, and three or more ranks add up in
    # an order that depends on it: that pass must not be a step of either life.
    wrapped(torch.zeros(1, 8)).sum().backward()
    optimizer.zero_grad()
    step = load(run, model, optimizer)
    while step < steps:
        PROGRESS.move("step", step)
        misbehave(fault, world, step, "before")
        generator = torch.Generator().manual_seed(1000 * step + world.rank)
        rows = torch.randn(4, 8, generator=generator)
        sum_over_ranks(torch.tensor([4, 8, 12]), "counts")
        loss = (wrapped(rows) - rows.sum(1, keepdim=True)).square().sum()
        with collective("gradients"):
            loss.backward()
        if not misbehave(fault, world, step, "loss"):
            sum_over_ranks(loss.detach().double(), "loss")
        optimizer.step()
        optimizer.zero_grad()
        agree(fault, world, step)
        step += 1
        if step % SAVE_EVERY == 0:
            with PROGRESS.during("save"):
                save(run, step, model, optimizer, world)
    if world.is_main:
        numbers = [int(hash_of(parameter)) for parameter in model.parameters()]
        (run.path / "weights").write_text(str(numbers))


def misbehave(fault: str, world: World, step: int, where: str) -> bool:
    """Do what was planted, in the first life only; whether to leave the next collective out."""
    kind, rank, at = fault.split(":")
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return False
    if (int(rank), int(at)) != (world.rank, step):
        return False
    if kind == "sleep" and where == "before":
        time.sleep(300)
    if kind == "die" and where == "before":
        time.sleep(3 * FIRST_CHECKS_S)  # who dies before the others have seen it is not missed
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop" and where == "before":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "raise" and where == "before":
        raise ValueError("planted")
    return kind == "skip" and where == "loss"


def agree(fault: str, world: World, step: int) -> None:
    """The house's other collectives, before one of which a rank falls asleep."""
    kind, rank, at = fault.split(":")
    if kind not in AGREEMENTS or int(at) != step or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return
    with handle_signals():
        defer_signals()
        for name, meet in AGREEMENTS.items():
            if name == kind and world.rank == int(rank):
                time.sleep(300)
            meet(world)


AGREEMENTS: dict[str, Callable[[World], object]] = {
    "deal": lambda world: scatter_from_main(lambda: list(range(world.size))),
    "worst": lambda world: max_over_ranks(0),
    "conclude": lambda world: combine_on_main(lambda: 1, sum),
    "on_main": lambda world: on_main(lambda: 1),
    "told": stop_requested,
}


def save(
    run: RunDir, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, world: World
) -> None:
    if world.is_main:
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, run.path / "saved.tmp")
        os.replace(run.path / "saved.tmp", run.path / "saved.pt")


def load(run: RunDir, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not (run.path / "saved.pt").is_file():
        return 0
    state = torch.load(run.path / "saved.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


if __name__ == "__main__":
    main(RunDir(Path(sys.argv[1])), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
