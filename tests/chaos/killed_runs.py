"""A real `foundling train --nproc 2` that is killed again and again: at points and at instants.

The driver only ever starts the same command. Between two kills a launcher that lives on starts its
ranks again by itself; one that is gone, or has given up, is started anew.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from compare_runs import assert_same_run

from foundling.checkpoint.folders import step_of
from foundling.checkpoint.retention import latest
from foundling.runtime.processes import die_with_parent
from foundling.runtime.run_dir import RunDir, read_lines
from foundling.runtime.run_reader import read_events, step_lines

ROOT = Path(__file__).parents[2]
ARMED = Path(__file__).parent / "armed"
POINTS = {"stage": 40, "write": 40, "fsync": 8, "rename": 2, "delete": 6, "evaluate": 3}
"""The points of a save and of an evaluation; a kill comes at up to so many passings."""
BY_BOTH = ("stage", "write", "fsync")
"""Points that rank 1 passes too."""
WHOM = ("launcher", "agent", "self", "all")
NAMES = {"self": "one rank", "agent": "torchrun", "launcher": "launcher", "all": "all"}
GONE_S, START_S = 20.0, 120.0


@dataclass(frozen=True)
class Order:
    """One kill: whom, of which rank, and where: a point's n-th passing, or after some seconds."""

    whom: str
    rank: int
    point: str = ""
    number: int = 0
    delay: float = 0.0
    begun: bool = False
    """Whether the seconds count from the first line that this life writes, or from its start."""

    @property
    def where(self) -> str:
        """The point, or which kind of instant."""
        return self.point or ("random instant" if self.begun else "random instant of the set-up")


def orders_of(seed: int, at_each: int, at_random: int, longest_s: float) -> list[Order]:
    """So many kills at each point and at random instants, everybody's turn as often."""
    chance = random.Random(seed)
    found = []
    for point, most in POINTS.items():
        for number in range(at_each):
            rank = chance.randrange(2) if point in BY_BOTH else 0
            whom = WHOM[number % len(WHOM)]
            found.append(Order(whom, rank, point, chance.randint(1, most)))
    for number in range(at_random):
        whom = WHOM[number % len(WHOM)]
        begun = number % 3 > 0
        delay = chance.uniform(0, longest_s)
        found.append(Order(whom, chance.randrange(2), delay=delay, begun=begun))
    chance.shuffle(found)
    return found


class Killed:
    """One run directory and the command that trains it."""

    def __init__(self, run: Path, words: list[str], **environment: str) -> None:
        self.run, self._orders = run, run.parent / f"{run.name}.orders"
        self._environment = environment
        self._command = [sys.executable, "-m", "foundling", *words, "--run", str(run)]
        self._job: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        self.seen: list[tuple[float, int]] = []
        """Of each kill: when it came, and the newest completed save at that moment."""

    @property
    def is_finished(self) -> bool:
        path = self.run / "run.json"
        return path.is_file() and json.loads(path.read_text())["status"] == "finished"

    def kill(self, order: Order) -> bool:
        """Have the job killed; False if it ended first, with the run finished."""
        token = self.run.parent / f"{self.run.name}.{len(self.seen)}.token"
        token.unlink(missing_ok=True)
        at = f"{order.point}:{order.number}:rank{order.rank}:{order.whom}\n{token}\n"
        self._write_order(at if order.point else "")
        while True:
            self._start()
            hit = self._at_point(token) if order.point else self._at_instant(order)
            if hit is not None:
                self._after(order, *hit)
                return True
            if self.is_finished:
                return False

    def finish(self) -> None:
        """Let the run come to its end."""
        self._write_order("")
        while not self.is_finished:
            self._start()
            assert self._job is not None
            self._job.wait()

    def _write_order(self, text: str) -> None:
        draft = self._orders.with_suffix(".new")
        draft.write_text(text)
        os.replace(draft, self._orders)

    def _start(self) -> None:
        """The command, unless it runs; a job that has given up is started anew."""
        if self._job is not None and self._job.poll() is None:
            return
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ARMED}{os.pathsep}{ROOT}",
            "TEST_DIE_ORDERS": str(self._orders),
            "TEST_DIE_SEES": str(self.run / "checkpoints"),
            "OMP_NUM_THREADS": "1",
            **self._environment,
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # a start is mostly imports
        me = os.getpid()
        with open(self.run.parent / f"{self.run.name}.log", "ab") as log:
            self._job = subprocess.Popen(
                self._command,
                env=environment,
                stdout=log,
                stderr=log,
                preexec_fn=lambda: die_with_parent(me),
            )
        self._began = time.time()

    def _lives(self) -> bool:
        return self._job is not None and self._job.poll() is None

    def _at_point(self, token: Path) -> tuple[float, list[str]] | None:
        """Wait until the order was carried out; None if the job ended without."""
        while not token.is_file():
            if not self._lives() and not token.is_file():
                return None
            time.sleep(0.02)
        said = json.loads(token.read_text())
        return said["time"], said["seen"]

    def _at_instant(self, order: Order) -> tuple[float, list[str]] | None:
        """Kill from outside, some time after the last start."""
        until = 0.0
        while self._lives():
            ranks = self.ranks()
            if not until and len(ranks) == 2 and (not order.begun or self._has_written()):
                until = time.time() + order.delay
            if until and time.time() >= until and len(ranks) == 2:
                folder = self.run / "checkpoints"
                seen = sorted(os.listdir(folder)) if folder.is_dir() else []
                self._strike(order, ranks)
                return time.time(), seen
            time.sleep(0.005)
        return None

    def _has_written(self) -> bool:
        path = self.run / "metrics.jsonl"
        return path.is_file() and path.stat().st_mtime > self._began

    def _strike(self, order: Order, ranks: dict[int, int]) -> None:
        assert self._job is not None
        agent = parent_of(ranks[order.rank])
        everyone = [self._job.pid, *([agent] if agent else []), *ranks.values()]
        alone = {"launcher": self._job.pid, "agent": agent, "self": ranks[order.rank]}
        for pid in everyone if order.whom == "all" else [alone[order.whom]]:
            with contextlib.suppress(ProcessLookupError):  # it died with its parent
                if pid:
                    os.kill(pid, signal.SIGKILL)

    def ranks(self) -> dict[int, int]:
        """The living ranks of the newest try of this launch."""
        assert self._job is not None
        tries = sorted(
            self.run.glob(f"logs/*-{self._job.pid}/try-*"), key=lambda p: p.stat().st_mtime
        )
        found = {}
        for path in tries[-1].glob("rank-*.pid") if tries else ():
            text = path.read_text()
            if text and is_ours(int(text)):
                found[int(path.stem[-5:])] = int(text)
        return found

    def _after(self, order: Order, moment: float, seen: list[str]) -> None:
        """What must be true after a kill: nobody lives on who should not, and no save is lost."""
        assert self._job is not None
        saved = max((int(m[1]) for n in seen if (m := re.fullmatch(r"step-(\d+)", n))), default=0)
        if order.whom in ("launcher", "all"):
            assert self._job.wait(GONE_S) == -signal.SIGKILL
            wait_until(lambda: not self.ranks(), "ranks outlive their launcher", GONE_S)
        self._began = time.time()
        self.seen.append((moment, saved))
        wait_until(lambda: self._newest() >= saved, f"step {saved} is lost", 5.0)

    def _newest(self) -> int:
        newest = latest(self.run / "checkpoints") if (self.run / "checkpoints").is_dir() else None
        return (step_of(newest) or 0) if newest is not None else 0

    def assert_taken_up(self) -> int:
        """Every life went on from what was saved when the one before it was killed, or from later;
        returns how many lives there were."""
        lives = sorted(self._lives_of_logs())
        for moment, saved in self.seen:
            later = [step for born, step in lives if born > moment and step is not None]
            if saved and later:
                assert later[0] >= saved, f"went on from {later[0]} and {saved} was saved"
        return len(lives)

    def _lives_of_logs(self) -> Iterator[tuple[float, int | None]]:
        for log in self.run.glob("logs/*/try-*/rank-00000.log"):
            pid = log.with_suffix(".pid")
            found = re.search(r"continuing .* from step (\d+) of", log.read_text())
            if pid.is_file():
                yield pid.stat().st_mtime, int(found[1]) if found else None


def parent_of(pid: int) -> int | None:
    """The process that started this one, if it is there."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def is_ours(pid: int) -> bool:
    """Whether a rank of ours lives under this number."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return b"foundling.launch.worker" in words


def wait_until(what: Callable[[], bool], otherwise: str, limit_s: float) -> None:
    last = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < last, otherwise
        time.sleep(0.02)


def assert_undisturbed(whole: Path, killed: Path) -> int:
    """The killed run did what the other did, to the bit; the evaluations that it left out, because
    they were killed twice, are counted."""
    assert_same_run(whole, killed)
    one, other = (
        [(line["sources"], line.get("skipped")) for line in step_lines(RunDir(run))]
        for run in (whole, killed)
    )
    assert one == other, "another ledger"
    wanted, found = (
        {line["step"]: line["bpb"] for line in read_events(RunDir(run)).measured["evaluated"]}
        for run in (whole, killed)
    )
    assert found.items() <= wanted.items(), "other scores"
    left = [line for line in read_lines(killed / "events.jsonl") if line["event"] == "failed"]
    assert wanted.keys() - found.keys() == {line["step"] for line in left}, "lost evaluations"
    return len(left)


def clear(run: Path) -> None:
    """Make room for a run."""
    shutil.rmtree(run, ignore_errors=True)
