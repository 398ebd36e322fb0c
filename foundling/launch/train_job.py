"""From `foundling train` to a job: join what is around us, or start the processes that are missing.

Also what `--from RUN@STEP` means for the command line; what it means for the state is in
train/start_point.py.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundling.config.errors import ConfigError, RunError
from foundling.config.load import dump_yaml
from foundling.config.run import RunConfig
from foundling.launch.detach import detach_train
from foundling.launch.environment import detect_environment, join_slurm, processes_here
from foundling.launch.launcher import (
    GRACE_S,
    RESTARTS,
    LaunchSpec,
    check_start,
    in_this_process,
    launch,
    refuse_locked,
    removed_if_unbegun,
)
from foundling.runtime.console import say
from foundling.runtime.exits import OUTCOMES
from foundling.runtime.files import naming_full_disk
from foundling.runtime.processes import die_with_parent
from foundling.runtime.run_dir import RunDir, split_step

FOREIGN = "TORCHELASTIC_RUN_ID"
"""Variable that torchrun sets in its ranks."""


@contextlib.contextmanager
def job_of(config: RunConfig, run: Path, **asked: Any) -> Iterator[bool]:
    """What surrounds a training: False where its processes were started and have ended well
    (`launch_train` takes `asked`); True where this process is to train inside of the context."""
    with naming_full_disk(run):
        if launch_train(config, run, **asked):
            yield False
            return
        with removed_if_unbegun(run), in_this_process(run, stop_after=config.train.stop_after):
            from foundling.train.oom import refuse_on_oom, snapshot_on_oom

            with refuse_on_oom(config.train), snapshot_on_oom(run):
                yield True


def launch_train(
    config: RunConfig,
    run: Path,
    *,
    nproc: int | None = None,
    detach: bool = False,
    restarts: int | None = None,
    grace: float | None = None,
) -> bool:
    """Start the processes of a run and see them through; False if this process is to train itself,
    alone or as a rank of the job around it."""
    place = detect_environment(nproc)
    if place.kind == "rank":
        given = {"nproc": nproc, "detach": detach, "restarts": restarts, "grace": grace}
        _refuse_unused("as a rank of a job", **given)
        if FOREIGN in os.environ and OUTCOMES not in os.environ:
            die_with_parent(os.getppid())  # a torchrun; our own ranks have done it
        join_slurm(place)
        return False
    processes = processes_here(config, nproc)
    is_alone = place.kind == "alone" and processes == 1 and not detach and restarts is None
    if is_alone:
        _refuse_unused("with one process, which has no others to wait for", grace=grace)
    if place.kind == "alone":
        refuse_locked(run)
    check_start(config, run, processes, place.nodes)
    if is_alone:
        return False
    job = LaunchSpec(
        run=run,
        processes=processes,
        command=("foundling", "train", "--run", str(run)),
        settings=dump_yaml(config),
        place=place,
        restarts=RESTARTS if restarts is None else restarts,
        grace_s=GRACE_S if grace is None else grace,
    )
    if detach:
        if place.kind != "alone" or "SLURM_JOB_ID" in os.environ:
            raise ConfigError("--detach has no effect inside a SLURM job; submit it and leave.")
        detach_train(job)
        return True
    if place.is_head:
        many = f" on each of {place.nodes} nodes" if place.nodes > 1 else ""
        say(f"{processes} processes{many}; every rank's output is kept under {run / 'logs'}")
    launch(job)
    return True


def _refuse_unused(where: str, **options: float | bool | None) -> None:
    for name, value in options.items():
        if value is not None and value is not False:
            raise ConfigError(f"--{name} has no effect {where}; give it to the launcher.")


@dataclass(frozen=True)
class Branch:
    """Where a new run leaves an old one."""

    run: Path
    step: int

    @property
    def child(self) -> Path:
        """Where the new run goes unless --run says otherwise."""
        return self.run.with_name(f"{self.run.resolve().name}-from-{self.step}")

    def settings_of_child(self, config: RunConfig) -> RunConfig:
        """The child's config: its parent is written down, and not where that one came from."""
        stated = f"{self.run}@{self.step}"
        return config.replace(train={"start": stated, "start_with": "everything"})


def branch_of(text: str) -> Branch:
    """RUN@STEP as it was typed; the checkpoint must be there."""
    if (found := split_step(text)) is None:
        raise ConfigError(f"--from {text} names no step; write RUN@STEP, such as runs/hamlet@1000.")
    run, step = RunDir(found[0]).require(), found[1]
    if not run.checkpoints.is_dir():  # kept elsewhere: the ranks will look
        return Branch(run.path, step)
    steps = sorted(int(p.name[5:]) for p in run.checkpoints.glob("step-*") if p.name[5:].isdigit())
    if step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise RunError(f"{run.path} has no checkpoint of step {step}; there are: {there}.")
    return Branch(run.path, step)
