"""A disk that is full for a while: training goes on, and no line is lost or torn."""

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foundling import cli
from foundling.checkpoint import latest, step_of
from foundling.config import RunConfig
from foundling.config.resolve import dump_yaml
from foundling.runtime import RunDir, lines
from foundling.runtime.exits import Exit
from foundling.runtime.lines import LineFile
from foundling.runtime.rundir import read_lines
from foundling.train import loop


class Disk:
    """Room for so many bytes more."""

    def __init__(self) -> None:
        self.room = 1 << 40

    def write(self, file: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = os.write(file, data[: self.room])
        self.room -= count
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    monkeypatch.setattr(lines, "os", disk)
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
        file.begin_again()
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
            patch.setattr(lines.os, "fsync", broken)
            assert not file.sync()
        assert file.sync()
    assert [line["step"] for line in read_lines(path)] == [1, 2]


def test_events_wait_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(run, "append", full)
        run.event("one")
        run.event("two")
    run.event("three")
    assert [line["event"] for line in read_lines(run.events_path)] == ["one", "two", "three"]


def after(patch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    real = loop.take_step

    def take_step(state: Any, *args: Any, **more: Any) -> Any:
        result = real(state, *args, **more)
        act(state.step)
        return result

    patch.setattr(loop, "take_step", take_step)


def test_a_run_outlives_a_full_disk(
    tiny: RunConfig, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full from step 3 to 6: the saves in between are left out. Full at the end: 74, and then the
    same command goes on."""
    config = replace(tiny, checkpoint=replace(tiny.checkpoint, every=2))
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    run = RunDir(tmp_path / "run")
    words = ["train", str(tmp_path / "run.yaml"), "--run", str(run.path)]

    def fill(step: int) -> None:
        disk.room = 10 if step in (3, 8) else 1 << 40 if step == 6 else disk.room

    with monkeypatch.context() as patch:
        after(patch, fill)
        code, sentence = cli._ended(words)
    assert (code, "no room for the lines" in sentence) == (Exit.UNSAVED, True), sentence
    newest = latest(run.checkpoints)
    assert newest is not None
    assert step_of(newest) == 6
    missed = {e["step"] for e in read_lines(run.events_path) if e["event"] == "not_saved"}
    assert missed == {4, 8}
    disk.room = 1 << 40
    assert cli._ended(words) == (Exit.OK, "")
    assert [line["step"] for line in read_lines(run.ledger_path)] == list(range(1, 9))
