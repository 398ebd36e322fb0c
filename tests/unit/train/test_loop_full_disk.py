"""A disk that is full for a while: training goes on, and no line is lost or torn."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from run_tools import Killed

from foundling.checkpoint.folders import step_of
from foundling.checkpoint.retention import latest
from foundling.cli import main
from foundling.config.load import dump_yaml
from foundling.config.run import RunConfig
from foundling.runtime import run_dir
from foundling.runtime.exits import Exit
from foundling.runtime.run_dir import LineFile, RunDir, read_lines
from foundling.runtime.run_reader import read_events
from foundling.train import loop
from foundling.train.loop import train


class Disk:
    """Room for so many bytes more."""

    def __init__(self) -> None:
        self.room = 1 << 40
        self.failing = ""
        """Name of the only file that there is no room for."""

    def write(self, file: int, data: bytes) -> int:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{file}"))
        if not self.room or name == self.failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = os.write(file, data[: self.room])
        self.room -= count
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    monkeypatch.setattr(run_dir, "os", disk)
    return disk


def test_lines_wait_for_room_and_none_is_torn(
    tmp_path: Path, disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    with LineFile(path) as file:
        file.append({"step": 1})
        assert file.sync()
        disk.room = 5
        for step in (2, 3):
            file.append({"step": step})
        assert not file.sync()
        assert capsys.readouterr().err.count("cannot be written") == 1
        disk.room = 1 << 40
        file.append({"step": 4})
        assert file.sync()
        assert [line["step"] for line in read_lines(path)] == [1, 2, 3, 4]
        disk.room = 3
        file.append({"step": 5})
        os.truncate(path, len('{"step": 1}\n'))
        disk.room = 1 << 40
        file.resume_after_cut()
        file.append({"step": 2})
    assert [line["step"] for line in read_lines(path)] == [1, 2]


def test_lines_are_written_anew_after_an_fsync_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(file: int) -> None:
        os.truncate(path, 12)  # the disk has lost them
        raise OSError(errno.EIO, "Input/output error")

    path = tmp_path / "a.jsonl"
    with LineFile(path) as file:
        file.append({"step": 1})
        assert file.sync()
        file.append({"step": 2})
        with monkeypatch.context() as patch:
            patch.setattr(run_dir.os, "fsync", broken)
            assert not file.sync()
        assert file.sync()
    assert [line["step"] for line in read_lines(path)] == [1, 2]


def test_events_wait_for_room(tmp_path: Path, disk: Disk) -> None:
    run = RunDir(tmp_path)
    run.events_path.write_text('{"event": "ze')  # torn by a kill
    disk.room = 0
    run.event("one")
    run.event("two")
    assert isinstance(run.sync(), OSError)
    disk.room = 1 << 40
    run.event("three")
    assert run.sync() is None
    assert [line["event"] for line in read_lines(run.events_path)] == ["one", "two", "three"]
    run.close()


def test_what_cannot_be_written_down_is_not_acted_on(tmp_path: Path, disk: Disk) -> None:
    run = RunDir(tmp_path)
    disk.room = 0
    with pytest.raises(OSError, match="No space"):
        run.durable_event("rolled_back", back_to=4)
    disk.room = 1 << 40
    run.durable_event("batch_left_out")
    assert [line["event"] for line in read_lines(run.events_path)] == [
        "rolled_back",
        "batch_left_out",
    ]


def test_no_checkpoint_is_newer_than_an_evaluation_or_an_event(
    tiny: RunConfig, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system fails for one file, and the run is killed once it is well again."""
    config = tiny.replace(checkpoint={"every": 2})
    config = config.replace(eval={"every": 2})
    run = RunDir(tmp_path / "run")
    disk.failing = run.events_path.name
    with pytest.raises(OSError, match="No space"):
        train(config, run)
    assert not run.exists
    disk.failing = ""

    def act(step: int) -> None:
        disk.failing = run.events_path.name if step < 5 else ""
        if step == 6:
            raise Killed

    with monkeypatch.context() as patch:
        after(patch, act)
        with pytest.raises(Killed):
            train(config, run)
    newest = latest(run.checkpoints)
    assert newest is not None
    assert step_of(newest) == 2, "step 4's would be newer than step 2's scores"
    train(config, run)
    assert [line["step"] for line in read_events(run).measured["evaluated"]] == [2, 4, 6, 8]
    assert [line["event"] for line in read_lines(run.events_path)].count("begun") == 1


def after(patch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    real = loop.train_step

    def train_step(state: Any, *args: Any, **more: Any) -> Any:
        result = real(state, *args, **more)
        act(state.step)
        return result

    patch.setattr(loop, "train_step", train_step)


def test_a_run_outlives_a_full_disk(
    tiny: RunConfig, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full from step 3 to 6: the saves in between are left out. Full at the end: 74, and then the
    same command goes on."""
    config = tiny.replace(checkpoint={"every": 2})
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    run = RunDir(tmp_path / "run")
    words = ["train", str(tmp_path / "run.yaml"), "--run", str(run.path)]

    def fill(step: int) -> None:
        disk.room = 10 if step in (3, 8) else 1 << 40 if step == 6 else disk.room

    with monkeypatch.context() as patch:
        after(patch, fill)
        code, sentence = main._run_and_report_exit(words)
    assert (code, "no room for its lines" in sentence) == (Exit.UNSAVED, True), sentence
    newest = latest(run.checkpoints)
    assert newest is not None
    assert step_of(newest) == 6
    missed = {e["step"] for e in read_lines(run.events_path) if e["event"] == "not_saved"}
    assert missed == {4}, "there is no room for the event of step 8 either, which 74 tells"
    disk.room = 1 << 40
    assert main._run_and_report_exit(words) == (Exit.OK, "")
    assert [line["step"] for line in read_lines(run.metrics_path)] == list(range(1, 9))


def test_a_start_without_room_ends_with_74_and_one_sentence(
    tiny: RunConfig, tmp_path: Path
) -> None:
    """Real processes that may write no file, or none as large as the tokenizer's; alone, and two
    under the launcher, which does not try again. With room the same commands go on."""
    (tmp_path / "run.yaml").write_text(dump_yaml(tiny))
    environment = {**os.environ, "PYTHONPATH": str(Path(main.__file__).parents[2])}
    jobs = {}
    for size, ranks in ((0, 2), (8 << 10, 1), (8 << 10, 2)):
        run = tmp_path / f"run-{size}-{ranks}"
        words = ["train", str(tmp_path / "run.yaml"), "--run", str(run), "--nproc", str(ranks)]
        jobs[run] = (
            words,
            subprocess.Popen(
                [sys.executable, "-m", "foundling", *words],
                env={**environment, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size)),
            ),
        )
    for run, (_, job) in jobs.items():
        out, told = job.communicate(timeout=100)
        assert job.returncode == Exit.UNSAVED, told
        assert "Traceback" not in out + told
        assert f"foundling: {run}: File too large; make room there" in out + told
        assert len(list(run.glob("logs/*/try-*"))) <= 1
        assert not (run / "run.json").exists()
    words, _ = jobs[tmp_path / f"run-{8 << 10}-1"]
    assert main._run_and_report_exit(words) == (Exit.OK, "")
