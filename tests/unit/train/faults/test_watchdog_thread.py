"""The watchdog of one process: what is a hang, what is not, and what it leaves behind (real ranks
that hang: tests/dist/test_watchdog.py)."""

import errno
import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foundling.config.errors import ConfigError
from foundling.config.run import GuardConfig
from foundling.runtime.dist import World
from foundling.runtime.exits import EndOfRun, Exit, read_outcomes
from foundling.runtime.progress import PROGRESS, WAITING, ProgressMarker
from foundling.runtime.run_dir import RunDir, read_lines
from foundling.train.faults import watchdog
from foundling.train.faults.heartbeat import (
    FINISHED,
    heartbeat_path,
    process_start,
    read_heartbeat,
    take_heartbeat,
    write_heartbeat,
)
from foundling.train.faults.watchdog import FOLDER, Watchdog, limit_of, slow_limit_s

CONFIG = GuardConfig(hang_s=1.0)


class Ends:
    """Stands for os._exit: notes the codes."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def __call__(self, code: int) -> None:
        self.codes.append(code)


@pytest.fixture(autouse=True)
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    found = Ends()
    monkeypatch.setattr(os, "_exit", found)
    return found


def stuck_here(ends: Ends, seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while not ends.codes and time.monotonic() < until:
        time.sleep(0.02)


def test_a_hang_ends_the_process_with_its_stack_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], ends: Ends
) -> None:
    monkeypatch.setenv("FOUNDLING_OUTCOMES", str(tmp_path))
    run = RunDir(tmp_path / "run")
    began = time.monotonic()
    with Watchdog(run, World(), CONFIG):
        PROGRESS.move("step", 7)
        stuck_here(ends)
    assert ends.codes[0] == Exit.WATCHDOG
    assert time.monotonic() - began < 4
    (hang,) = [line for line in read_lines(run.events_path) if line["event"] == "hang"]
    assert (hang["step"], hang["culprit"]) == (7, [])
    report = (run.path / hang["report"]).read_text()
    assert "stuck_here" in report
    assert "in phase 'step' of step 8" in report
    assert "stuck_here" in capfd.readouterr().err
    outcome = read_outcomes(tmp_path)[0]
    assert outcome.code == Exit.WATCHDOG
    assert "no progress for" in outcome.sentence


def moves() -> None:
    for step in range(12):
        PROGRESS.move("step", step)
        time.sleep(0.1)


def saves() -> None:
    PROGRESS.move("step", 3)
    with PROGRESS.during("save"):
        time.sleep(1.2)


def waits() -> None:
    with PROGRESS.during(WAITING):
        time.sleep(1.2)


def starts() -> None:
    time.sleep(1.2)


@pytest.mark.parametrize("work", [moves, saves, waits, starts])
def test_work_that_may_take_its_time_is_no_hang(
    work: Callable[[], None], tmp_path: Path, ends: Ends
) -> None:
    with Watchdog(RunDir(tmp_path), World(), CONFIG):
        work()
    assert ends.codes == []


def test_what_may_take_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "HANG_SLOW_S", 60.0)
    assert slow_limit_s(GuardConfig(hang_s=700.0)) == 700
    assert limit_of("step", CONFIG) == 1
    assert limit_of("first step", CONFIG) == limit_of("evaluate", CONFIG) == 60
    assert limit_of(WAITING, CONFIG) == float("inf")
    assert limit_of("save", CONFIG, 600) == limit_of("roll back", CONFIG, 600) == 660
    assert limit_of("save", CONFIG, 0.0) == limit_of("evaluate", CONFIG, 600) == 60


def test_who_waits_for_rank_0_to_evaluate_is_excused(tmp_path: Path, ends: Ends) -> None:
    run, busy = RunDir(tmp_path), ProgressMarker()
    busy.phase = "evaluate"
    folder = tmp_path / FOLDER
    folder.mkdir(parents=True)
    write_heartbeat(folder, take_heartbeat(0, 1, busy))
    with Watchdog(run, World(rank=1, size=2), CONFIG):
        PROGRESS.move("step", 3)
        stuck_here(ends, 1.6)
        assert ends.codes == []
        busy.phase = "step"
        write_heartbeat(folder, take_heartbeat(0, 2, busy))
        stuck_here(ends)
    assert ends.codes[:1] == [Exit.WATCHDOG]


def test_a_neighbour_that_dies_early_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the usual limit a beat is five seconds; the job must not wait for several of them."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    run, folder = RunDir(tmp_path), tmp_path / FOLDER
    folder.mkdir(parents=True)
    other = subprocess.Popen(["sleep", "60"])
    beat = take_heartbeat(0, 1, ProgressMarker())
    write_heartbeat(folder, replace(beat, pid=other.pid, started_at=process_start(other.pid)))
    world = World(rank=1, size=2, local_rank=1)
    with pytest.raises(RuntimeError), Watchdog(run, world, GuardConfig()):  # noqa: PT012
        time.sleep(1.2)
        other.kill()
        other.wait()
        fell = time.monotonic()
        raise RuntimeError("Connection reset by peer")
    assert time.monotonic() - fell < 3
    (hang,) = [line for line in read_lines(run.events_path) if line["event"] == "hang"]
    assert hang["culprit"] == [0]
    assert "gone without a word" in hang["why"]


def test_a_process_that_was_suspended_has_not_been_idle(tmp_path: Path, ends: Ends) -> None:
    with Watchdog(RunDir(tmp_path), World(), CONFIG) as dog:
        PROGRESS.move("step", 3)
        dog._ran_at -= 100
        PROGRESS.moved_at -= 100
        time.sleep(0.5)
    assert ends.codes == []


def test_an_alarm_of_an_earlier_life_is_none(tmp_path: Path, ends: Ends) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir(parents=True)
    request = folder / "abort_request.json"
    request.write_text(json.dumps({"folder": "hang-1", "finding": "long ago"}))
    os.utime(request, (1, 1))
    with Watchdog(RunDir(tmp_path), World(), CONFIG):
        PROGRESS.move("step", 1)
        time.sleep(0.4)
        assert ends.codes == []
        stuck_here(ends)  # and does not stand in the way of a new one
    assert ends.codes[:1] == [Exit.WATCHDOG]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (None, FINISHED),
        (EndOfRun(Exit.REQUEUE, "saved"), "EndOfRun: saved"),
        (ValueError("bad"), "ValueError: bad"),
    ],
)
def test_how_a_process_left_is_written_down(
    error: Exception | None, told: str, tmp_path: Path
) -> None:
    RunDir(tmp_path).write_info({})  # what is no run keeps nothing of a stop

    def work() -> None:
        with Watchdog(RunDir(tmp_path), World(), CONFIG):
            if error is not None:
                raise error

    if error is None:
        work()
    else:
        with pytest.raises(type(error)):
            work()
    beat = read_heartbeat(heartbeat_path(tmp_path / FOLDER, 0))
    assert beat is not None
    assert beat.ended == told


def test_a_refused_run_leaves_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with pytest.raises(ConfigError), Watchdog(run, World(), CONFIG):
        raise ConfigError("no")
    assert not run.path.exists()


def test_switched_off_it_does_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with Watchdog(run, World(), GuardConfig(hang_s=0)):
        PROGRESS.move("step", 1)
    assert not run.path.exists()


def test_who_ended_without_a_word_is_told_of_once(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir(parents=True)
    progress = ProgressMarker()
    progress.move("step", 41)
    write_heartbeat(folder, replace(take_heartbeat(0, 5, progress), pid=1))
    run = RunDir(tmp_path)
    with Watchdog(run, World(), CONFIG) as dog:
        told = dog.report_previous_death()
        assert told is not None
        assert "rank 0 ended without a word" in told
        assert "step 42" in told
        assert dog.report_previous_death() is None
    assert [line["ranks"] for line in read_lines(run.events_path)] == [[0]]
    with Watchdog(run, World(), CONFIG) as dog:
        assert dog.report_previous_death() is None  # this time it said how it ended


def test_a_full_disk_ends_no_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: Ends
) -> None:
    """Beats cannot be written: the backstop in C is still put off, and a hang still ends the job's
    process; nothing is written to a file mapped into memory, which would be a SIGBUS."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    put_off, looks = list[float](), list[int]()
    with Watchdog(RunDir(tmp_path / "run"), World(), CONFIG) as dog:
        monkeypatch.setattr(watchdog, "write_heartbeat", full)
        monkeypatch.setattr(
            watchdog.faulthandler, "dump_traceback_later", lambda s, **_: put_off.append(s)
        )
        monkeypatch.setattr(dog, "_check", lambda: looks.append(1))
        until = time.monotonic() + 5
        while len(looks) < 2 and time.monotonic() < until:
            PROGRESS.move("step", 1)
            time.sleep(0.02)
        with Path("/proc/self/maps").open() as maps:
            assert not [line for line in maps if str(tmp_path) in line]
    assert len(looks) >= 2
    assert len(put_off) >= 2


def test_a_hang_ends_the_process_on_a_disk_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: Ends
) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with Watchdog(RunDir(tmp_path), World(), CONFIG):
        PROGRESS.move("step", 1)
        stuck_here(ends)
    assert ends.codes[:1] == [Exit.WATCHDOG]
    assert len(list((tmp_path / FOLDER).glob("hang-*"))) == 1


def test_a_disk_that_is_full_at_the_request_keeps_no_empty_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    requests = watchdog.AbortRequests(tmp_path, 0)
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        requests.claim()
    assert not list(tmp_path.iterdir())


def test_a_heartbeat_that_is_written_slowly_excuses_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: Ends
) -> None:
    def slow(*given: Any) -> None:
        time.sleep(0.7)
        write_heartbeat(*given)

    with Watchdog(RunDir(tmp_path), World(), GuardConfig(hang_s=2.0)):
        monkeypatch.setattr(watchdog, "SUSPENDED_S", 0.0)
        monkeypatch.setattr(watchdog, "write_heartbeat", slow)
        PROGRESS.move("step", 1)
        stuck_here(ends)
    assert ends.codes[:1] == [Exit.WATCHDOG]
