"""Watchdog: a thread in each process that ends a job without progress, and its abort requests."""

import contextlib
import faulthandler
import json
import os
import shutil
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

from foundling.config.errors import UserError
from foundling.config.run import GuardConfig
from foundling.runtime.dist import World, flight_record
from foundling.runtime.exits import EndOfRun, Exit, write_outcome
from foundling.runtime.progress import PROGRESS, SAVE_PHASES, SLOW_PHASES, WAITING
from foundling.runtime.run_dir import RunDir
from foundling.train.faults.hang_report import (
    RankStates,
    flight_path,
    make_report,
    name_ranks,
)
from foundling.train.faults.heartbeat import (
    FINISHED,
    Heartbeat,
    dump_stacks_on_signal,
    dump_threads,
    heartbeat_path,
    is_gone,
    read_heartbeat,
    request_stacks,
    stack_of,
    take_heartbeat,
    write_heartbeat,
)

# An abort request, made by one rank and answered by every rank, through files that all of them see.
#
# The request is a file that only one rank can make, with the name of a folder in it; every rank
# writes its evidence there, and when the rank that made it has added its finding, all of them end.
# A request of an earlier start of the job is older than our own first beat, by the clock of the
# disk that holds both.

DUMP_S = 3.0
"""Patience with the flight recorder: it asks the driver, which may be what hangs."""


@dataclass(frozen=True)
class AbortRequest:
    """The content of the abort request file."""

    folder: Path
    """Where the evidence goes."""
    finding: str = ""
    """Why the job stops, in a sentence; empty while the reporting rank collects evidence."""


class AbortRequests:
    """The one abort request that a job can have."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._path = folder / "abort_request.json"
        self._started_ns = 0

    def begin(self, first_beat: Path) -> None:
        """Note when this start of the job began: older requests do not count."""
        self._started_ns = first_beat.stat().st_mtime_ns

    def current(self) -> AbortRequest | None:
        """The present request, if there is one."""
        try:
            if self._path.stat().st_mtime_ns < self._started_ns:
                return None
            said = json.loads(self._path.read_text())
            return AbortRequest(self._folder / str(said["folder"]), str(said["finding"]))
        except (OSError, ValueError, KeyError):
            return None

    def claim(self) -> AbortRequest | None:
        """Make the request and leave this rank's evidence; None where another rank came first."""
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_mtime_ns < self._started_ns:
                self._path.unlink()
        name = f"hang-{time.strftime('%Y%m%d-%H%M%S')}-{self._rank}"
        request = AbortRequest(self._folder / name)
        request.folder.mkdir(exist_ok=True)
        try:
            self._create(self._draft(name, ""))
        except OSError as error:
            request.folder.rmdir()
            if isinstance(error, FileExistsError):
                return None
            raise
        self.leave_evidence(request)
        return request

    def _create(self, draft: Path) -> None:
        """Make the file whole and only once; FileExistsError where it is there."""
        try:
            os.link(draft, self._path)
        except OSError:  # perhaps a disk without links; a file read before it is whole is none
            with open(self._path, "x") as file:
                file.write(draft.read_text())
        finally:
            draft.unlink(missing_ok=True)

    def publish(self, request: AbortRequest, finding: str) -> None:
        """Add the finding: every rank that reads it ends."""
        os.replace(self._draft(request.folder.name, finding), self._path)

    def withdraw(self, request: AbortRequest) -> None:
        """Remove a request that proved groundless."""
        self._path.unlink(missing_ok=True)
        shutil.rmtree(request.folder, ignore_errors=True)

    def leave_evidence(self, request: AbortRequest) -> None:
        """Every thread's stack, and what torch remembers of its collectives."""
        dump_threads(request.folder / f"rank-{self._rank:05d}.stacks")

        def keep() -> None:
            for name, data in flight_record().items():
                with contextlib.suppress(OSError):
                    flight_path(request.folder, self._rank, name).write_bytes(data)

        helper = threading.Thread(target=keep, name="flight recorder", daemon=True)
        helper.start()
        helper.join(timeout=DUMP_S)

    def _draft(self, name: str, finding: str) -> Path:
        draft = self._folder / f"abort_request.tmp-{self._rank}-{os.getpid()}"
        draft.write_text(json.dumps({"folder": name, "finding": finding}))
        return draft


# A thread in each process that ends a job which stands still, and says who holds it up.
#
# Every rank writes a beat, a small file under RUN/logs/watchdog, with its step, phase, collectives
# and stack. A rank without progress within the limit makes an abort request: it reads all beats,
# names the culprit, prints the stacks, keeps torch's flight recorder, and every process ends
# with Exit.WATCHDOG, to be started again from the last checkpoint. A rank does so at once when
# another rank of its machine has died, or when it leaves by an error itself. A phase that may take
# long on one rank excuses the others that wait for it.
#
# Rejected: NCCL's own watchdog alone, which names a collective and no rank, and knows nothing of
# gloo or of a rank that is stuck in Python.

FOLDER = "logs/watchdog"
HANG_SLOW_S = 1800.0
SAVE_MARGIN_S = 60.0
"""Added to the limit of a save itself, whose own error says more than the watchdog's report."""
HARD_EXIT_S = 30.0
"""Beyond the longest limit, a process whose watchdog gets no turn is ended from C."""
SUSPENDED_S = 5.0
"""Beyond four beats: a pause that lasted so much too long was a suspension."""
FIRST_CHECKS_S = 0.5
"""Between checks until every neighbour was seen alive: only then is one known to be gone."""


class Watchdog:
    """Around the whole of a job: `with Watchdog(run, world, config.guard): ...`"""

    def __init__(
        self,
        run: RunDir,
        world: World,
        config: GuardConfig,
        *,
        save_s: float = 0.0,
    ) -> None:
        """`save_s`: the limit that a save has of its own."""
        self._run, self._world, self._config = run, world, config
        self._limit = partial(limit_of, config=config, save_s=save_s)
        self._longest_s = max(map(self._limit, SLOW_PHASES))
        self.folder = run.path / FOLDER
        self.beat_s = min(max(config.hang_s / 40, 0.1), 5.0)
        self.wait_s = 2.2 * self.beat_s
        """Long enough for every live rank to beat, and to answer an abort request."""
        self._abort_requests = AbortRequests(self.folder, world.rank)
        self._answered: Path | None = None
        self._made: list[Path] = []
        self._number = 0
        self._neighbours: dict[int, Heartbeat] = {}
        self._ran_at = time.monotonic()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._exits = contextlib.ExitStack()
        self._stacks: TextIO | None = None

    def __enter__(self) -> "Watchdog":
        PROGRESS.reset()
        if not self._config.hang_s:
            return self
        self._made = [p for p in (self.folder, *self.folder.parents) if not p.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        own = heartbeat_path(self.folder, self._world.rank)
        with contextlib.suppress(OSError):
            os.replace(own, own.with_suffix(".last"))
        self._stacks = self._exits.enter_context(dump_stacks_on_signal(own.with_suffix(".stacks")))
        self._beat()
        self._abort_requests.begin(own)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join(timeout=HARD_EXIT_S)
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):
            if error is None:
                self._beat(ended=FINISHED)
            elif isinstance(error, UserError | EndOfRun | KeyboardInterrupt | SystemExit):
                self._beat(ended=_describe(error))  # every rank comes to such an end by itself
            else:
                self._report_error_exit(error)
        self._exits.close()
        if isinstance(error, UserError | EndOfRun) and not self._run.exists:
            self._remove_own_files()  # a command that was refused or stopped has not begun a run

    def report_previous_death(self) -> str | None:
        """Which ranks died without a report in the previous start (rank 0, once every rank has
        begun): after a power cut nothing else records it."""
        lost: list[Heartbeat] = []
        for path in sorted(self.folder.glob("rank-*.last")):
            beat = read_heartbeat(path)
            path.unlink(missing_ok=True)
            if beat is not None and not beat.ended:
                lost.append(beat)
        if not lost:
            return None
        ranks = [beat.rank for beat in lost]
        self._run.event("ended_without_a_word", ranks=ranks, places=[b.place() for b in lost])
        return (
            f"before, {name_ranks(ranks)} ended without a word; rank {ranks[0]} {lost[0].place()}"
        )

    def _watch(self) -> None:
        """The thread's loop."""
        while not self._stop.wait(self._pause()):
            self._excuse_suspension()
            for act in (self._beat, self._check):  # a full disk must not end the watch
                with contextlib.suppress(OSError):
                    act()
            self._ran_at = time.monotonic()

    def _pause(self) -> float:
        is_new = any(rank not in self._neighbours for rank in self._local_ranks())
        return min(self.beat_s, FIRST_CHECKS_S) if is_new else self.beat_s

    def _local_ranks(self) -> list[int]:
        """The other ranks of this machine."""
        first = self._world.rank - self._world.local_rank
        count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        ranks = range(first, min(first + count, self._world.size))
        return [rank for rank in ranks if rank != self._world.rank]

    def _check(self) -> None:
        """Answer an abort request, or make one where a rank is gone or this one stands still."""
        request = self._abort_requests.current()
        if request is not None:
            self._answer(request)
        elif self._lost_neighbours():
            self._request_abort("a process of the job is gone")
        elif self._overdue() > 0 and not self._is_main_busy():
            limit, stall = self._limit(PROGRESS.phase), PROGRESS.stall_s()
            self._request_abort(f"no progress for {stall:.1f} s (the limit is {limit:g} s)")

    def _beat(self, ended: str = "", stack: list[str] | None = None) -> None:
        """Write this rank's heartbeat."""
        self._number += 1
        if not ended and self._stacks is not None:
            # A thread of C, for when this one no longer gets the interpreter's lock.
            patience = self._longest_s + HARD_EXIT_S
            faulthandler.dump_traceback_later(patience, exit=True, file=self._stacks)
        beat = take_heartbeat(self._world.rank, self._number, PROGRESS, ended=ended, stack=stack)
        write_heartbeat(self.folder, beat)

    def _excuse_suspension(self) -> None:
        """A process that was suspended has not been idle all that time; a beat that is written
        slowly is no suspension."""
        away = time.monotonic() - self._ran_at - self.beat_s
        if away > SUSPENDED_S + 4 * self.beat_s:
            PROGRESS.moved_at += away

    def _overdue(self) -> float:
        """Seconds past the moment of the abort request, which comes early enough that the report is
        out within the limit; rank 0 comes first, because its output is the one that is shown."""
        early = self.wait_s + (2 if self._world.is_main else 0) * self.beat_s
        limit = self._limit(PROGRESS.phase)
        return PROGRESS.stall_s() - max(limit - early, limit / 2)

    def _lost_neighbours(self) -> set[int]:
        """Ranks of this machine that were seen alive and are gone without a word."""
        lost = set()
        for rank in self._local_ranks():
            known = self._neighbours.get(rank)
            if known is None:
                beat = read_heartbeat(heartbeat_path(self.folder, rank))
                if beat is not None and not beat.ended and not is_gone(beat):
                    self._neighbours[rank] = beat
            elif is_gone(known):
                last = read_heartbeat(heartbeat_path(self.folder, rank))
                if last is None or (last.pid == known.pid and not last.ended):
                    lost.add(rank)
        return lost

    def _request_abort(self, why: str) -> None:
        request = self._abort_requests.claim()
        if request is None:
            return
        states = self._collect_states()
        if not states.dead and self._is_excused(states):
            self._abort_requests.withdraw(request)
            return
        self._end_process(self._publish(request, why, states))

    def _answer(self, request: AbortRequest) -> None:
        """Another rank made the request: write evidence, and end once its finding is there."""
        if self._answered != request.folder:
            self._answered = request.folder
            self._abort_requests.leave_evidence(request)
        if request.finding:
            self._end_process(request.finding)
        elif self._overdue() > 2 * self.wait_s + HARD_EXIT_S:
            self._end_process("the watchdog of another rank asked for an end and gave no finding")

    def _collect_states(self, beating: bool = True) -> RankStates:
        """Every rank's beat, and which ranks have stopped beating. Where a process has died, it is
        the cause, and there is no wait for other ranks' beats: the job could be starting again."""
        ranks = range(self._world.size)
        before = {rank: read_heartbeat(heartbeat_path(self.folder, rank)) for rank in ranks}
        waits = not self._lost_neighbours()
        until = time.monotonic() + (self.wait_s if waits else 0)
        while time.monotonic() < until:
            time.sleep(self.beat_s / 2)
            if beating:
                self._beat()
        states = RankStates({}, self._world.size, dead=self._lost_neighbours())
        for rank in ranks:
            beat, old = read_heartbeat(heartbeat_path(self.folder, rank)), before[rank]
            if beat is None:
                continue
            states.beats[rank] = beat
            still = waits and old is not None and (old.pid, old.number) == (beat.pid, beat.number)
            if still and not beat.ended and rank not in states.dead:
                states.silent.add(rank)
        asked = [states.beats[rank].pid for rank in states.silent if rank in self._neighbours]
        for pid in asked:
            request_stacks(pid)
        time.sleep(self.beat_s if asked else 0)
        return states

    def _is_main_busy(self) -> bool:
        """The common excuse, before an abort request is made: rank 0 saves or evaluates alone."""
        beat = read_heartbeat(heartbeat_path(self.folder, 0))
        return beat is not None and self._is_excused(RankStates({0: beat}, self._world.size))

    def _is_excused(self, states: RankStates) -> bool:
        """Whether some rank is in a phase that may take long, and within that phase's limit."""
        if PROGRESS.stall_s() > self._longest_s:
            return False
        mine = self._limit(PROGRESS.phase)
        return any(
            self._limit(beat.phase) > max(mine, beat.stall_s)
            for rank, beat in states.beats.items()
            if rank not in states.silent and not beat.ended and beat.inside is None
        )

    def _publish(self, request: AbortRequest, why: str, states: RankStates) -> str:
        """Print and keep the report, and add its sentence to the request: the others end."""
        report = make_report(why, states, request.folder)
        path = request.folder / "report.txt"
        with contextlib.suppress(OSError):
            path.write_text(report.text + "\n")
            self._run.event(
                "hang",
                step=PROGRESS.step,
                culprit=list(report.culprit),
                why=report.sentence,
                report=str(path.relative_to(self._run.path)),
            )
        # Not through sys.stderr: the main thread may hold its lock.
        os.write(2, f"{report.text}\n(kept in {path})\n".encode())
        self._abort_requests.publish(request, report.sentence)
        return report.sentence

    def _end_process(self, sentence: str) -> None:
        with contextlib.suppress(OSError):
            self._beat(ended=f"the watchdog: {sentence}")
            write_outcome(Exit.WATCHDOG, sentence)
        os._exit(Exit.WATCHDOG)

    def _report_error_exit(self, error: BaseException) -> None:
        """This rank leaves by an error, perhaps because of another rank: report which."""
        self._beat(ended=_describe(error), stack=stack_of(error))
        if self._world.size < 2:
            return
        until = time.monotonic() + (0 if self._world.is_main else 2 * self.beat_s)
        while time.monotonic() < until and self._abort_requests.current() is None:
            if 0 in self._lost_neighbours():
                break
            time.sleep(self.beat_s / 20)  # rank 0 comes first
        if request := self._abort_requests.claim():
            states = self._collect_states(beating=False)
            self._publish(request, f"rank {self._world.rank} fell", states)

    def _remove_own_files(self) -> None:
        for path in self.folder.glob(f"rank-{self._world.rank:05d}.*"):
            path.unlink(missing_ok=True)
        for folder in self._made:
            with contextlib.suppress(OSError):  # it holds files of others
                folder.rmdir()


def limit_of(phase: str, config: GuardConfig, save_s: float = 0.0) -> float:
    """Seconds that a phase may take; where a save is waited for, that has a limit of its own."""
    if phase == WAITING:
        return float("inf")
    if phase in SAVE_PHASES:
        return max(slow_limit_s(config), save_s + SAVE_MARGIN_S if save_s else 0.0)
    return slow_limit_s(config) if phase in SLOW_PHASES else config.hang_s


def slow_limit_s(config: GuardConfig) -> float:
    """Seconds for what takes longer: set-up, a first step, a save, an evaluation, a rollback."""
    return max(HANG_SLOW_S, config.hang_s)


def _describe(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
