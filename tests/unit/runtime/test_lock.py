"""The lock of a run: who holds it, who may take it over, and how a launcher shares it."""

import json
import os
import time
from pathlib import Path

import pytest

from foundling.config.errors import RunError
from foundling.runtime import lock
from foundling.runtime.lock import STALE_S, TOKEN, LockHolder, RunLock, is_locked, read_holder

ELSEWHERE = {"pid": 7, "host": "another-host", "since": 1000.0, "job": "", "token": ""}


def leave_lock(folder: Path, age_s: float, **fields: object) -> None:
    path = folder / "lock"
    path.write_text(json.dumps({**ELSEWHERE, **fields}))
    os.utime(path, (time.time() - age_s, time.time() - age_s))


def test_an_orderly_end_leaves_no_name(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        holder = read_holder(tmp_path)
        assert holder is not None
        assert holder.pid == os.getpid()
    assert read_holder(tmp_path) is None
    assert not is_locked(tmp_path)


def test_a_live_holder_on_another_machine_is_respected(tmp_path: Path) -> None:
    leave_lock(tmp_path, age_s=STALE_S - 30)
    assert is_locked(tmp_path)
    with pytest.raises(RunError, match="process 7 on another-host since"), RunLock(tmp_path):
        pass
    assert read_holder(tmp_path) == LockHolder(**ELSEWHERE)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_dead_one_is_taken_over_with_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_lock(tmp_path, age_s=STALE_S + 30)
    assert not is_locked(tmp_path)
    with RunLock(tmp_path):
        assert is_locked(tmp_path)
    assert "was left by process 7 on another-host" in capsys.readouterr().err


def test_a_job_that_slurm_has_requeued_elsewhere_takes_its_own_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_lock(tmp_path, age_s=1, job="41")
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    with pytest.raises(RunError, match="SLURM job 41"), RunLock(tmp_path):
        pass
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    with RunLock(tmp_path):
        assert read_holder(tmp_path) != LockHolder(**ELSEWHERE)


def test_the_heart_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.02)
    with RunLock(tmp_path):
        os.utime(tmp_path / "lock", (1000.0, 1000.0))
        last = time.monotonic() + 5
        while (tmp_path / "lock").stat().st_mtime == 1000.0:
            assert time.monotonic() < last, "no heartbeat"
            time.sleep(0.02)


def test_a_launchers_rank_is_inside_and_a_stranger_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunLock(tmp_path, "secret"):
        monkeypatch.setenv(TOKEN, "secret")
        with RunLock(tmp_path):
            # The rank of a killed job may still be writing: the next one waits, and says for whom.
            monkeypatch.setattr(lock, "INNER_PATIENCE_S", 0.1)
            with pytest.raises(RunError, match="earlier job"), RunLock(tmp_path):
                pass
        monkeypatch.setenv(TOKEN, "guess")
        with pytest.raises(RunError, match=f"process {os.getpid()}"), RunLock(tmp_path):
            pass
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


def test_a_disk_without_locks_relies_on_the_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(lock.errno.ENOLCK, "no locks available")

    monkeypatch.setattr(lock.fcntl, "flock", unsupported)
    leave_lock(tmp_path, age_s=1)
    with pytest.raises(RunError, match="another-host"), RunLock(tmp_path):
        pass
    leave_lock(tmp_path, age_s=STALE_S + 1)
    with RunLock(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(RunError, match="/proc/x cannot be made; give --run a folder you may"):
        RunLock(Path("/proc/x")).__enter__()
