"""Runs that outlive the connection they were started from, and commands that reach them again.

A detached launcher has a session of its own, ignores the hang-up of the terminal and writes to
RUN/logs/launcher.log. Who it is stands in the run's lock, so that `runs stop` needs nothing else.
Rejected: tmux, which a fresh pod does not have.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

from foundling.config.errors import RunError
from foundling.launch.launcher import LaunchSpec, clear_unbegun, newest_step
from foundling.launch.logs import (
    appended_text,
    last_end,
    launcher_log,
    newest_log,
    require_log,
    tail,
    wait_until,
)
from foundling.runtime.console import say
from foundling.runtime.exits import GOOD, EndOfRun, Exit
from foundling.runtime.files import write_text_atomic
from foundling.runtime.lock import LockHolder, is_locked, read_holder
from foundling.runtime.run_dir import RunDir

STARTING_S = 60.0
"""How long a detached launcher is watched for its beginning before it is left alone."""


def detach_train(job: LaunchSpec) -> None:
    """Start `foundling train` in a session of its own and return once the run goes; what is refused
    on the way is printed here, because its own output goes to a file."""
    run, was_there = job.run, job.run.exists()
    config = run / "logs" / "detached.yaml"
    write_text_atomic(config, job.settings)
    words = ["train", str(config), "--run", str(run)]
    words += ["--nproc", str(job.processes), "--restarts", str(job.restarts)]
    words += ["--grace", f"{job.grace_s:g}"]
    log, events = launcher_log(run), RunDir(run).events_path
    start, before = _size(log), _size(events)
    child = _spawn(words, log)
    wait_until(lambda: _size(events) != before or child.poll() is not None, STARTING_S)
    if child.poll() is not None and child.returncode != 0:
        said = log.read_bytes()[start:].decode(errors="replace").strip().splitlines()
        sentence = said[-1].removeprefix("foundling: ") if said else "it said nothing"
        if child.returncode == Exit.USER and not was_there:
            clear_unbegun(run)
        raise EndOfRun(child.returncode if child.returncode > 0 else Exit.CRASH, sentence)
    how = "goes on" if _size(events) > before else "has not begun yet and is prepared"
    say(f"{run} {how} in the background as process {child.pid}")
    say(f"  foundling runs logs {run} --follow    to see what it says")
    say(f"  foundling runs stop {run}             to save and end it")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _spawn(words: list[str], log: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "foundling", *words]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited by the child
    try:
        with open(log, "ab") as out:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    finally:
        signal.signal(signal.SIGHUP, before)


def show_log(run: Path, rank: int = 0) -> None:
    """Print a rank's output of the newest try."""
    _show(require_log(run, rank).read_bytes())


def follow_log(run: Path, rank: int = 0) -> None:
    """Show what a rank says, from its last lines on until the run is let go, and end with the run's
    code; Ctrl-C leaves, and the run goes on."""
    path = newest_log(run, rank)
    if path is None and not is_locked(run):
        require_log(run, rank)
    try:
        if path is not None:
            _show(tail(path))
        for text in appended_text(lambda: newest_log(run, rank), lambda: not is_locked(run)):
            _show(text)
    except KeyboardInterrupt:
        say(f"\nleft; {run} goes on")
        return
    end = last_end(run)
    if end is not None and end[0] not in GOOD:
        raise EndOfRun(end[0], f"{run} ended with code {end[0]}: {end[1]}")
    say(state_of(run))


def _show(text: bytes) -> None:
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()


def stop(run: Path, wait_s: float, kill: bool) -> str:
    """Tell a run to save and end, wait for it, and say what came of it."""
    directory = RunDir(run)
    holder = read_holder(run)
    if not is_locked(run) or holder is None:
        directory.require()
        return f"{run} is not running: {state_of(run)}"
    before = newest_step(run)
    if holder.job:
        no_requeue_file(run, holder.job).touch()
    _signal(run, holder, signal.SIGTERM)
    if wait_until(lambda: not is_locked(run), wait_s):
        return state_of(run)
    if not kill:
        raise EndOfRun(
            Exit.KILLED,
            f"{run} was told to stop and is still at it after {wait_s:g} s; wait for it, or give"
            " --kill to end it without a save",
        )
    _signal(run, holder, signal.SIGKILL)
    wait_until(lambda: not is_locked(run), 30)
    return f"{run} was killed; its last checkpoint is of step {max(before, newest_step(run))}"


def no_requeue_file(run: Path, job: str) -> Path:
    """The file that keeps a SLURM job from requeueing itself once it has saved."""
    return run / "logs" / f"stopped-{job}"


def _signal(run: Path, holder: LockHolder, number: signal.Signals) -> None:
    """Send the holder a signal: by the kernel here, by SLURM elsewhere."""
    if holder.host == socket.gethostname():
        try:
            os.kill(holder.pid, number)
        except ProcessLookupError:
            return
        except PermissionError:
            raise RunError(f"{run} belongs to another user: {holder}; ask them.") from None
        return
    if holder.job and shutil.which("scancel"):
        # The step's launchers, not the batch script: it would be killed before they have saved.
        subprocess.run(["scancel", f"--signal={number.name[3:]}", holder.job], check=True)
        return
    raise RunError(f"{run} is held by {holder}; run `foundling runs stop` on {holder.host}.")


def state_of(run: Path) -> str:
    """One sentence: how far a run has come and whether it is going."""
    directory = RunDir(run)
    if not directory.exists:
        return f"{run} has not begun"
    info = directory.read_info()
    step = newest_step(run)
    if info["status"] == "finished":
        return f"{run} is finished at step {step}"
    if is_locked(run):
        return (
            f"{run} is running, held by {read_holder(run)}; its last checkpoint is of step {step}"
        )
    if not step:
        return (
            f"{run} is stopped before its first checkpoint; the same `foundling train` begins anew"
        )
    return (
        f"{run} is stopped and saved at step {step}; the same `foundling train` goes on from there"
    )
