"""How a run is told to stop and how it says how it ended."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from foundling.runtime import processes
from foundling.runtime.dist import World
from foundling.runtime.exits import (
    OUTCOMES,
    EndOfRun,
    Exit,
    RankOutcome,
    read_outcomes,
    verdict,
    write_outcome,
)
from foundling.runtime.processes import (
    defer_signals,
    deferring_signals,
    handle_signals,
    stop_requested,
)

ROOT = Path(__file__).parents[3]


def outcome(rank: int, code: int, moment: float = 0.0) -> RankOutcome:
    return RankOutcome(rank, code, f"rank {rank}", "here", 1, moment)


def decided(*outcomes: RankOutcome) -> RankOutcome | None:
    return verdict({each.rank: each for each in outcomes})


def test_the_documented_codes_are_the_codes() -> None:
    table = (ROOT / "docs" / "exits.md").read_text()
    told = {int(code): name for code, name in re.findall(r"^\| (\d+) \| (\w+) \|", table, re.M)}
    assert told == {int(code): code.name for code in Exit}


def test_rank_0s_word_decides_and_the_others_alone_do_not_count() -> None:
    assert decided() is None
    assert decided(outcome(1, 0), outcome(2, Exit.REQUEUE)) is None
    assert decided(outcome(0, 0), outcome(1, Exit.CRASH)) == outcome(0, 0)
    assert decided(outcome(0, Exit.REQUEUE), outcome(1, 0)) == outcome(0, Exit.REQUEUE)


def test_of_failures_the_hopeless_and_then_the_first_decides() -> None:
    first, second = outcome(3, Exit.CRASH, 1.0), outcome(0, Exit.CRASH, 2.0)
    assert decided(second, first) == first
    mistake = outcome(2, Exit.USER, 3.0)
    assert decided(second, first, mistake) == mistake
    assert mistake.is_final
    assert not first.is_final
    assert not outcome(1, Exit.WATCHDOG).is_final


def test_outcomes_are_left_for_the_launcher_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(OUTCOMES, raising=False)
    write_outcome(0, "")
    monkeypatch.setenv(OUTCOMES, str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    write_outcome(Exit.REQUEUE, "saved")
    (tmp_path / "rank-00001.json").write_text('{"torn')
    found = read_outcomes(tmp_path)
    assert list(found) == [3]
    assert (found[3].code, found[3].sentence, found[3].pid) == (75, "saved", os.getpid())
    assert EndOfRun(75, "saved").code is Exit.REQUEUE


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT"])
def test_a_signal_becomes_a_reason_and_the_old_handler_comes_back(name: str) -> None:
    number = signal.Signals[name]
    # Under nohup the tests themselves ignore SIGHUP, and that would be respected.
    usual, before = signal.signal(number, signal.default_int_handler), signal.getsignal(number)
    try:
        with handle_signals():
            defer_signals()
            assert stop_requested(World()) is None
            os.kill(os.getpid(), number)
            assert stop_requested(World()) == name
        assert signal.getsignal(number) is before
        assert stop_requested(World()) is None
    finally:
        signal.signal(number, usual)


def test_a_rank_that_has_stopped_hears_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of another node may pass the same signal on a moment later."""
    monkeypatch.setenv("RANK", "0")
    before = {number: signal.getsignal(number) for number in processes.SIGNALS}
    try:
        with handle_signals():
            defer_signals()
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop_requested(World()) == "SIGUSR1"
        assert {signal.getsignal(number) for number in processes.SIGNALS} == {signal.SIG_IGN}
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Codes that this process would have ended with at once."""
    codes: list[int] = []
    monkeypatch.setattr(processes, "_end", lambda ear, code, sentence: codes.append(code))
    return codes


def wait_for(codes: list[int], count: int) -> None:
    last = time.monotonic() + 5
    while len(codes) < count and time.monotonic() < last:
        time.sleep(0.005)


def test_a_second_ctrl_c_ends_at_once(ended: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    with handle_signals():
        defer_signals()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop_requested(World()) == "SIGINT"
        last = time.monotonic() + 5
        told = ""
        while "Ctrl-C again" not in told and time.monotonic() < last:
            told += capfd.readouterr().err
        assert not ended
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(ended, 1)
    assert ended == [Exit.INTERRUPTED]


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 75), ("SIGUSR1", 75)])
def test_until_somebody_asks_a_signal_ends_at_once(
    name: str, code: int, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with handle_signals():
        os.kill(os.getpid(), signal.Signals[name])
        wait_for(ended, 1)
        assert ended == [code]
        with deferring_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop_requested(World()) is not None
            time.sleep(0.05)
            assert ended == [code], "it is waited for shards: who waits will look"
        assert len(ended) == 2, "and did not"


def test_an_ignored_hang_up_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handle_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop_requested(World()) is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_time_is_up_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    with handle_signals(stop_after=500):
        assert stop_requested(World()) is None
        moment = time.time() + 500
        monkeypatch.setattr(processes.time, "time", lambda: moment)
        assert stop_requested(World()) == "the time limit"


def test_slurms_end_leaves_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 60))
    with handle_signals(margin=59.9):
        assert stop_requested(World()) is None, "a job shorter than its margin gets half of it"
    with handle_signals(margin=10):
        assert stop_requested(World()) is None
        moment = time.time() + 50.1
        monkeypatch.setattr(processes.time, "time", lambda: moment)
        assert stop_requested(World()) == "the time limit"


def test_slurms_limit_is_asked_for_once_and_by_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/log\necho 2030-01-02T03:04:05\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    wanted = time.mktime(time.strptime("2030-01-02T03:04:05", "%Y-%m-%dT%H:%M:%S"))
    assert processes.slurm_end() == wanted
    monkeypatch.setenv("RANK", "1")
    with handle_signals():
        pass
    assert (tmp_path / "log").read_text() == "asked\n"
    squeue.write_text("#!/bin/sh\nexit 1\n")
    assert processes.slurm_end() is None


FAMILY = """
import os, subprocess, sys, time
from foundling.runtime.processes import die_with_parent
if len(sys.argv) > 1:
    die_with_parent(int(sys.argv[1]))
    print(os.getpid(), flush=True)
    time.sleep(60)
subprocess.Popen([sys.executable, "-c", os.environ["FAMILY"], str(os.getpid())])
time.sleep(60)
"""


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    environment = {**os.environ, "FAMILY": FAMILY, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, "-c", FAMILY], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert Path(f"/proc/{child}").exists()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    last = time.monotonic() + 5
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < last, "the child lives on"
        time.sleep(0.01)


def test_a_child_whose_parent_went_first_ends(tmp_path: Path) -> None:
    code = (
        "from foundling.runtime.processes import die_with_parent; die_with_parent(1); print('no')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (1, "")
