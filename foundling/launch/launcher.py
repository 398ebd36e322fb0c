"""A launch: hold the run, try, look at how it ended, and try again where that may help.

    launch(Job(run=..., processes=8, command=("foundling", "train", "run.yaml", ...)))

The launcher imports no torch and does no work: it takes signals, passes them on, to
start the ranks again after a crash, and to end with a code that means something. Several nodes have
a launcher each; they meet in the run directory, which all of them see anyway for the checkpoints.
"""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TextIO

from foundling.config.errors import RunError, UserError
from foundling.config.run import RunConfig
from foundling.launch.attempt import POLL_S, Attempt, LauncherSignal, run_attempt
from foundling.launch.bad_nodes import lost_node, note_named_node, note_own_failures, read_bad_nodes
from foundling.launch.environment import LaunchEnvironment, slurm_name
from foundling.launch.logs import Echo, log_name, new_launch, note_end, wait_until
from foundling.plan.resolve import problems
from foundling.runtime.console import say
from foundling.runtime.exits import (
    GOOD,
    OUTCOMES,
    EndOfRun,
    Exit,
    RankOutcome,
    read_outcomes,
    verdict,
)
from foundling.runtime.files import write_text_atomic
from foundling.runtime.lock import RunLock, is_locked, read_holder, release_lock
from foundling.runtime.processes import EARLY, SIGNALS, handle_signals, pause_signal_thread
from foundling.runtime.run_dir import RunDir


def check_start(config: RunConfig, run: Path, processes: int, nodes: int = 1) -> None:
    """Refuse what would be refused by every rank."""
    found = problems(
        config, run=run, world=nodes * processes, per_node=processes, fingerprint=fingerprint_of
    )
    for problem in found:
        raise problem


def fingerprint_of(folder: Path) -> str:
    """What tells one tokenizer from another."""
    from foundling.tokenizer.tokenizer import Tokenizer

    return Tokenizer.load(folder).fingerprint


def refuse_locked(run: Path) -> None:
    """Refuse a run that another process holds."""
    if is_locked(run):
        raise RunError(
            f"{run} is in use by {read_holder(run) or 'another process'}; watch it with"
            f" `foundling runs logs {run} --follow`."
        )


@contextmanager
def removed_if_unbegun(run: Path) -> Iterator[None]:
    """Remove the folder of a run that was refused or stopped before it began, if it was made here:
    it would only be in the way of the next command."""
    was_there = run.exists()
    try:
        yield
    except (UserError, EndOfRun) as end:
        code = end.exit_code if isinstance(end, UserError) else end.code
        if code in (Exit.USER, Exit.REQUEUE, Exit.INTERRUPTED) and not was_there:
            clear_unbegun(run)
        raise


def clear_unbegun(run: Path, *, is_held: bool = False) -> None:
    """Remove the folder of a run that has written nothing but locks and logs; with anything else in
    it, it stays as it is, and the lock says that a start of ours was here. `is_held`: by this
    process itself."""
    names = {path.name for path in run.iterdir()} if run.is_dir() else {"no folder"}
    if not names <= {"lock", "lock.rank0", "logs"} or (not is_held and is_locked(run)):
        return
    for name in ("lock", "lock.rank0"):
        (run / name).unlink(missing_ok=True)
    shutil.rmtree(run / "logs", ignore_errors=True)
    with suppress(OSError):  # it holds files of others by now
        run.rmdir()


GRACE_S = 600.0
RESTARTS = 3
SETTLE_S = 60.0
"""How long a node waits for what the others say about a try that it has ended."""


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """What is to be run, and how stubbornly."""

    run: Path
    processes: int
    """Ranks on this machine."""
    command: tuple[str, ...]
    """Module and arguments of every rank."""
    settings: str = ""
    """A config as YAML; its file under the launch's folder is given to the ranks as a last word."""
    place: LaunchEnvironment = field(default_factory=lambda: LaunchEnvironment("alone"))
    restarts: int = RESTARTS
    """Tries after the first that end without a new checkpoint."""
    grace_s: float = GRACE_S
    """Seconds that the ranks have to save and end after a stop signal."""


def launch(job: LaunchSpec) -> None:
    """Run a job to its end; anything but success raises EndOfRun."""
    name = job.place.name or time.strftime("%Y%m%d-%H%M%S-") + str(os.getpid())
    # Nodes of one job must know the same token; on one machine it should be hard to guess.
    token = job.place.name or uuid.uuid4().hex
    asked = LauncherSignal()
    with contextlib.ExitStack() as stack:
        if job.place.nodes == 1:  # other nodes may still be reading what would be removed
            stack.enter_context(removed_if_unbegun(job.run))
        stack.enter_context(_handlers(asked, is_alone=job.place.kind == "alone"))
        if job.place.is_head:
            stack.enter_context(RunLock(job.run, token))
        folder, command = job.run / "logs" / name, list(job.command)
        if job.settings:
            job = replace(job, command=(*job.command, str(folder / "config.yaml")))
        if job.place.is_head:
            write_text_atomic(folder / "config.yaml", job.settings)
            counts = {"processes": job.processes, "nodes": job.place.nodes}
            new_launch(job.run, name, {**counts, "command": command})
        _wait_for(folder)
        end = _tries(job, folder, token, asked)
        if job.place.is_head:
            with contextlib.suppress(OSError):  # the code says as much
                note_end(folder, end.code, _sentence(end))
        if end.code != Exit.OK:
            raise EndOfRun(end.code, _end_sentence(job, end))


def _tries(job: LaunchSpec, folder: Path, token: str, asked: LauncherSignal) -> RankOutcome:
    """Try until it is done, nothing helps, or someone says stop."""
    number, wasted, reached = 0, 0, _progress(job.run)
    known = read_bad_nodes(job.run)
    while True:
        attempt = Attempt(
            folder / f"try-{number}",
            number,
            job.processes,
            job.place,
            token,
            job.command,
            job.grace_s,
        )
        attempt.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            if job.place.is_head:
                stack.enter_context(Echo(attempt.folder / log_name(0)))
            end = run_attempt(attempt, asked)
        if job.place.nodes > 1 and not asked.signal and end.code not in GOOD:
            note_own_failures(job.run, attempt)
        if job.place.is_head:
            end = _agreed(attempt, end) if job.place.nodes > 1 else end
            end = _without_bad_nodes(job, attempt, end, known)
            now = _progress(job.run)
            wasted, reached = (1, now) if now > reached else (wasted + 1, reached)
            is_over = end.is_final or bool(asked.signal) or wasted > job.restarts
            _tell_nodes(attempt, end, is_over)
        else:
            end, is_over = _first_node_says(attempt, end)
        if is_over:
            return end
        number += 1
        if job.place.is_head:
            where = f"step {newest_step(job.run)}"
            say(f"{_sentence(end)}; starting again from {where} (try {number + 1})")


def _without_bad_nodes(
    job: LaunchSpec, attempt: Attempt, end: RankOutcome, known: list[str]
) -> RankOutcome:
    """A step of SLURM cannot exchange a node: once one is known to be bad, the job's next life
    goes on without it."""
    if job.place.nodes == 1 or end.is_final:
        return end
    note_named_node(job.run, attempt, end)
    lost = lost_node(job.run, known)
    return replace(end, rank=-1, code=Exit.NODE, sentence=lost) if lost else end


def _tell_nodes(attempt: Attempt, end: RankOutcome, is_over: bool) -> None:
    """What the first node makes of a try; in a large job it alone reads what every rank said."""
    if attempt.place.nodes > 1:
        content = json.dumps({"is_over": is_over, "end": asdict(end)})
        write_text_atomic(attempt.folder / "over.json", content + "\n")


def _first_node_says(attempt: Attempt, end: RankOutcome) -> tuple[RankOutcome, bool]:
    """How the try ended and whether the job is over: the first node's word, so that none tries
    alone; without one there is no node to try with."""
    if end.code not in GOOD:
        attempt.mark_failed()
    note = attempt.folder / "over.json"
    if not wait_until(note.is_file, 2 * SETTLE_S, POLL_S):
        return end, True
    said = json.loads(note.read_text())
    return RankOutcome(**said["end"]), bool(said["is_over"])


def _agreed(attempt: Attempt, end: RankOutcome) -> RankOutcome:
    """The outcome of a try over all nodes: a failure of any of them, or rank 0's success."""
    if end.code not in GOOD:
        attempt.mark_failed()
    last = time.monotonic() + SETTLE_S
    while time.monotonic() < last:
        said = verdict(read_outcomes(attempt.folder))
        if said is not None:
            return said
        if attempt.has_failed:
            return end if end.code not in GOOD else replace(end, code=Exit.CRASH)
        time.sleep(POLL_S)
    return replace(end, code=Exit.CRASH, sentence="rank 0 has not said how it ended")


def newest_step(run: Path) -> int:
    """The newest step with a checkpoint's name; 0 if there is none. Whether it is whole is for the
    ranks to find out."""
    found = [re.fullmatch(r"step-(\d+)", path.name) for path in run.glob("checkpoints/step-*")]
    return max((int(match[1]) for match in found if match), default=0)


def _progress(run: Path) -> int:
    """How far a run has come, to see whether a try was worth it; where checkpoints are kept
    elsewhere, the last step written down, which a resume cuts back to its checkpoint."""
    if step := newest_step(run):
        return step
    from foundling.runtime.run_reader import last_line

    return int(last_line(RunDir(run)).get("step", 0))


def _end_sentence(job: LaunchSpec, end: RankOutcome) -> str:
    """The launcher's last word: what rank 0 has said was shown already, and one node is enough."""
    if not job.place.is_head or (end.rank == 0 and end.code == Exit.USER):
        return ""
    if EARLY in end.sentence:
        return end.sentence
    said = f"exit code {int(end.code)}" if end.rank == 0 else _sentence(end)
    return f"{said}; every rank's output is in {job.run / 'logs'}"


def _sentence(end: RankOutcome) -> str:
    who = f"rank {end.rank} on {end.host}: " if end.rank > 0 else ""
    return who + (end.sentence.rstrip(".") or f"ended with code {end.code}")


def _wait_for(folder: Path, limit_s: float = 120.0) -> None:
    """A node that is not the first waits until the first one holds the run."""
    if not wait_until((folder / "launch.json").is_file, limit_s):
        raise EndOfRun(
            Exit.NODE,
            f"{folder} was not made by the first node within {limit_s:g} s; every node must see the"
            " run directory",
        )


@contextlib.contextmanager
def _handlers(asked: LauncherSignal, *, is_alone: bool) -> Iterator[None]:
    """Note signals while the job runs. Afterwards they are ignored, unless all went well on one
    machine: a node's launcher whose ranks have ended often gets the signal late, and must not die
    of it."""
    before = {}
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, asked.note)
    went_well = False
    try:
        with pause_signal_thread():
            yield
        went_well = True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if went_well and is_alone else signal.SIG_IGN)


@contextlib.contextmanager
def in_this_process(run: Path, *, stop_after: float = 0, margin: float = 120) -> Iterator[None]:
    """Train in this process: listen to signals, and leave the output under the run too.

    Our own ranks' output is kept already.
    """
    was_there = run.exists()

    def leave() -> None:
        """As `RunLock` and `removed_if_unbegun` do, for a start that is stopped in its set-up."""
        is_held = release_lock(run)
        if not was_there and "RANK" not in os.environ:
            clear_unbegun(run, is_held=is_held)

    with handle_signals(stop_after, margin, leave), contextlib.ExitStack() as stack:
        log = None
        if OUTCOMES not in os.environ:
            log = stack.enter_context(contextlib.closing(_ProcessLog(run)))
        stack.enter_context(contextlib.redirect_stdout(Tee(sys.stdout, log)))
        stack.enter_context(contextlib.redirect_stderr(Tee(sys.stderr, log)))
        yield


class _ProcessLog:
    """The log of a process that no launcher of ours has started: alone, or a rank of another's.
    Opened with the first line, because a refused command leaves no files."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._file: TextIO | None = None

    def write(self, text: str) -> None:
        """Keep `text`, without what only moves and paints on a terminal."""
        if self._file is None:
            if not (self._run / "lock").exists():
                return  # the run is not ours yet
            self._file = self._open()
        self._file.write(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text))
        self._file.flush()

    def _open(self) -> TextIO:
        env, rank = os.environ, int(os.environ.get("RANK", "0"))
        alone = time.strftime("%Y%m%d-%H%M%S-") + str(os.getpid())
        name = slurm_name() if "SLURM_STEP_ID" in env else env.get("TORCHELASTIC_RUN_ID", alone)
        folder = self._run / "logs" / name
        if rank == 0:
            new_launch(self._run, name, {"processes": int(env.get("WORLD_SIZE", "1"))})
        (folder / "try-0").mkdir(parents=True, exist_ok=True)
        return open(folder / "try-0" / log_name(rank), "a", encoding="utf-8")

    def close(self) -> None:
        """The end of it."""
        if self._file is not None:
            self._file.close()


class Tee(io.TextIOBase):
    """A stream that may also be kept, and that cannot end a run: not when the reader (head, a
    closed window) has gone, and not when the disk of its log is full."""

    def __init__(self, shown: TextIO, kept: _ProcessLog | None) -> None:
        self._shown, self._kept = shown, kept

    def write(self, text: str) -> int:
        if self._kept is not None:
            with contextlib.suppress(OSError):
                self._kept.write(text)
        with self._unharmed():
            self._shown.write(text)
        return len(text)

    def flush(self) -> None:
        with self._unharmed():
            self._shown.flush()

    @contextlib.contextmanager
    def _unharmed(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            # What python still holds goes nowhere too, and does not complain at the end.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._shown.fileno())
            os.close(nowhere)
        except OSError:
            pass

    def isatty(self) -> bool:
        return self._shown.isatty()

    def fileno(self) -> int:
        return self._shown.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._shown.encoding
