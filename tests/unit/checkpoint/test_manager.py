"""Saves behind the training: what is written is what was there, failures are told, not raised."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_samples import blank, same_bits, sample
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from foundling.checkpoint import manifest, writer
from foundling.checkpoint.manager import CheckpointManager
from foundling.checkpoint.manifest import load_meta, verify
from foundling.checkpoint.reader import load_tensors
from foundling.checkpoint.retention import latest
from foundling.config.errors import CheckpointError
from foundling.config.run import CheckpointConfig
from foundling.runtime import files
from foundling.runtime.dist import World
from foundling.runtime.progress import PROGRESS


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


def make(home: Path, timeout_s: float | None = None, **fields: Any) -> CheckpointManager:
    return CheckpointManager(home, CheckpointConfig(**fields), World(), timeout_s)


class Gate:
    """Holds the writer at a point until it is opened."""

    def __init__(self, point: str) -> None:
        self.point, self.reached, self.opened = point, threading.Event(), threading.Event()

    def __call__(self, point: str) -> None:
        if point == self.point:
            self.reached.set()
            assert self.opened.wait(20)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate("write")
    monkeypatch.setattr(files, "failpoint", gate)
    yield gate
    gate.opened.set()


def full(point: str) -> None:
    if point == "write":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_training_may_change_the_tensors_as_soon_as_save_returns(home: Path, gate: Gate) -> None:
    tensors = sample(3)
    with make(home) as saver:
        saver.save(3, tensors, {"step": 3})
        assert gate.reached.wait(20)  # nothing has been written yet
        assert saver.poll() == []
        for tensor in tensors.values():
            tensor.zero_()
        gate.opened.set()
        path = saver.finish()
    assert path == home / "step-00000003"
    into = blank(sample(3))
    load_tensors(path, into)
    assert same_bits(into, sample(3))
    assert load_meta(path) == {"step": 3}


def test_what_stopped_training_and_what_did_not_are_measured(home: Path, gate: Gate) -> None:
    with make(home) as saver:
        stall = saver.save(1, sample(1), {})
        time.sleep(stall + 0.2)
        gate.opened.set()
        saver._wait()
        (result,) = saver.poll()
    assert result.step == 1
    assert result.path == home / "step-00000001"
    assert 0 < result.stall_s <= stall < result.write_s
    assert result.bytes == sum(f.stat().st_size for f in result.path.iterdir()) - (
        (result.path / "manifest.json").stat().st_size
    )
    assert saver.poll() == []


def test_a_save_waits_for_the_one_before(home: Path, gate: Gate) -> None:
    with make(home) as saver:
        saver.save(1, sample(1), {})
        threading.Timer(0.4, gate.opened.set).start()
        stall = saver.save(2, sample(2), {})
        saver.finish()
        assert [result.step for result in saver.poll()] == [1, 2], "left to be told"
    assert stall > 0.3
    assert [path.name for path in sorted(home.iterdir())] == ["step-00000001", "step-00000002"]
    for step in (1, 2):
        into = blank(sample(step))
        load_tensors(home / f"step-{step:08d}", into)
        assert same_bits(into, sample(step))


def test_a_save_that_hangs_costs_the_next_one_and_nothing_else(
    home: Path, gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    with make(home, timeout_s=1) as saver:
        saver.save(1, sample(1), {})
        saver.save(2, sample(2), {})
        (result,) = saver.poll()
        assert result.path is None
        assert "step 2 was not saved" in result.error
        assert "step 2 was not saved" in capsys.readouterr().err
        with pytest.raises(CheckpointError, match="still being written"):
            saver.finish()
        gate.opened.set()
        saver.save(3, sample(3), {})
        assert saver.finish() == home / "step-00000003"
    verify(home / "step-00000001")


def test_a_full_disk_is_told_and_training_goes_on(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with make(home) as saver:
        saver.save(1, sample(1), {}, wait=True)
        saver.poll()
        with monkeypatch.context() as patch:
            patch.setattr(files, "failpoint", full)
            saver.save(2, sample(2), {}, wait=True)
        results = saver.poll()
        assert [result.path for result in results] == [None]
        assert "No space left on device; make room there" in results[0].error
        assert f"warning: {results[0].error}" in capsys.readouterr().err
        assert [path.name for path in home.iterdir()] == ["step-00000001"]
        with pytest.raises(CheckpointError, match="No space left"):
            saver.finish()
        saver.save(3, sample(3), {})
        assert saver.finish() == home / "step-00000003"


@pytest.mark.parametrize("point", ["stage", "write", "fsync", "rename"])
def test_whatever_fails_is_told_in_a_sentence(
    home: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(here: str) -> None:
        if here == point:
            raise MemoryError("the host is full")

    with make(home) as saver:
        with monkeypatch.context() as patch:
            patch.setattr(files, "failpoint", broken)
            saver.save(1, sample(1), {}, wait=True)
        (result,) = saver.poll()
        assert result.error.startswith("the checkpoint of step 1 could not be written: MemoryError")
        assert "\n" not in result.error
        assert not any(home.iterdir())


def test_tidying_up_that_fails_costs_no_checkpoint(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(here: str) -> None:
        if here == "delete":
            raise OSError(errno.EIO, "Input/output error")

    with make(home, keep=1) as saver:
        saver.save(1, sample(1), {}, wait=True)
        monkeypatch.setattr(files, "failpoint", broken)
        saver.save(2, sample(2), {})
        assert saver.finish() == home / "step-00000002"
    assert "could not be tidied up" in capsys.readouterr().err


def test_finish_is_only_content_with_a_whole_checkpoint(home: Path) -> None:
    with make(home) as saver:
        assert saver.finish() is None
        saver.save(1, sample(1), {}, wait=True)
        (home / "step-00000001" / "meta.json").write_text("{ }")
        with pytest.raises(CheckpointError, match=r"meta\.json"):
            saver.finish()
    with make(home) as saver:
        assert saver.finish() is None, "damaged, and the only one"
        assert saver.latest() is None


def test_leaving_waits_for_the_save_under_way(home: Path, gate: Gate) -> None:
    threading.Timer(0.3, gate.opened.set).start()

    def train() -> None:
        with make(home) as saver:
            saver.save(1, sample(1), {})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert latest(home) == home / "step-00000001"


def test_without_background_a_save_is_done_when_it_returns(home: Path) -> None:
    with make(home, background=False) as saver:
        saver.save(1, sample(1), {})
        assert latest(home) == home / "step-00000001"


def test_a_callers_mistake_is_raised_at_once(home: Path) -> None:
    with make(home) as saver:
        with pytest.raises(TypeError, match="tensors only"):
            saver.save(1, {"a": 3}, {})  # type: ignore[dict-item]
        with pytest.raises(ValueError, match="step 2"):
            saver.save(1, sample(1), {"step": 2})
        assert not home.exists()


def test_a_plan_is_made_once_and_again_for_other_tensors(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    plain = writer._files_of
    monkeypatch.setattr(writer, "_files_of", lambda *a: made.append(1) or plain(*a))
    with make(home, keep=9) as saver:
        for step in (1, 2):
            saver.save(step, sample(step), {})
        assert len(made) == 1
        more = {**sample(3), "model.new": torch.ones(5)}
        saver.save(3, more, {})
        other = {**more, "model.new": torch.ones(6)}
        saver.save(4, other, {})
        saver.save(5, {**other, "model.new": torch.ones(6).double()}, {})
        saver.finish()
    assert len(made) == 4
    for step, tensors in ((2, sample(2)), (3, more), (4, other)):
        into = blank(tensors)
        load_tensors(home / f"step-{step:08d}", into)
        assert same_bits(into, tensors)


def test_the_memory_of_a_save_is_used_again(home: Path) -> None:
    with make(home) as saver:
        saver.save(1, sample(1), {}, wait=True)
        place = saver._stage._block.data_ptr()
        saver.save(2, sample(2), {}, wait=True)
        assert saver._stage._block.data_ptr() == place
    assert len(saver._stage._block) == 0


def test_large_states_are_cut_into_files(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "FILE_BYTES", 9000)
    tensors = {f"model.{i}": torch.full((10, 70 * (i % 3 + 1)), float(i)) for i in range(9)}
    with make(home) as saver:
        saver.save(1, tensors, {})
        path = saver.finish()
    assert isinstance(path, Path)
    assert len(list(path.glob("*.distcp"))) == 6
    into = blank(tensors)
    load_tensors(path, into)
    assert same_bits(into, tensors)


def test_what_a_resume_has_read_is_not_hashed_for_the_keeping_rules(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(home, keep=2) as saver:
        for step in (1, 2):
            saver.save(step, sample(step), {}, wait=True)
    hashed: list[str] = []
    plain = manifest._sha256
    monkeypatch.setattr(manifest, "_sha256", lambda path: hashed.append(str(path)) or plain(path))
    with make(home, keep=2) as saver:
        assert saver.latest() == home / "step-00000002"
        assert [name for name in hashed if "step-00000002" in name]
        hashed.clear()
        saver.save(3, sample(3), {}, wait=True)
        assert not [name for name in hashed if "step-00000002" in name]
    assert [path.name for path in sorted(home.iterdir())] == ["step-00000002", "step-00000003"]


def test_keeping_rules_do_not_hash_what_was_verified_when_written(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    plain = manifest._sha256
    monkeypatch.setattr(manifest, "_sha256", lambda path: hashed.append(str(path)) or plain(path))
    with make(home, keep=2) as saver:
        for step in (1, 2):
            saver.save(step, sample(step), {}, wait=True)
        hashed.clear()
        saver.save(3, sample(3), {}, wait=True)
        assert [Path(name).parent.name.partition(".")[0] for name in hashed] == ["step-00000003"]
        os.utime(home / "step-00000002" / "__0_0.distcp")
        hashed.clear()
        saver.save(4, sample(4), {}, wait=True)
        assert not [name for name in hashed if "step-00000002" in name], "it went, unread"
        saver.save(5, sample(5), {}, wait=True)
    assert sorted(path.name for path in home.iterdir()) == ["step-00000004", "step-00000005"]


def test_torch_reads_our_checkpoints_by_itself(home: Path) -> None:
    with make(home) as saver:
        saver.save(1, sample(1), {})
        path = saver.finish()
    into = blank(sample(1))
    with pytest.warns(UserWarning, match="single process"):
        dcp_load(into, checkpoint_id=str(path), no_dist=True)
    assert same_bits(into, sample(1))


def test_the_best_are_kept_by_scores_given_late(home: Path) -> None:
    with make(home, keep=1, keep_best=2) as saver:
        for step, score in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 9.0), (5, None)):
            saver.save(step, sample(step), {}, wait=True)
            if score is not None:
                saver.score(step, score)
        saver.save(6, sample(6), {}, score=0.5, wait=True)
    assert sorted(int(path.name[5:]) for path in home.iterdir() if path.is_dir()) == [2, 6]


def test_a_rollback_takes_later_checkpoints_off_the_list(home: Path) -> None:
    with make(home, keep=2) as saver:
        for step in (2, 4):
            saver.save(step, sample(step), {}, wait=True)
        saver.abandon_after(2)
        assert saver.latest() == home / "step-00000002"
        assert (home / "step-00000004.abandoned-1").is_dir()
        saver.save(4, sample(40), {}, wait=True)
        into = blank(sample(40))
        load_tensors(home / "step-00000004", into)
        assert same_bits(into, sample(40)), "the new course's, not the old one's"
        saver.save(6, sample(6), {}, wait=True)
    assert sorted(path.name for path in home.iterdir()) == ["step-00000004", "step-00000006"]


def test_finish_wants_the_last_step_and_no_older_one(home: Path, gate: Gate) -> None:
    """The save before hangs, the last one is left out, and then the old one ends well after all."""
    with make(home, timeout_s=1) as saver:
        saver.save(1, sample(1), {})
        saver.save(2, sample(2), {})
        gate.opened.set()
        assert not saver.has_saved(2)
        with pytest.raises(CheckpointError, match="step 2 was not saved"):
            saver.finish(2)
        saver.save(2, sample(2), {})
        assert saver.has_saved(2)
        assert saver.finish(2) == home / "step-00000002"
    with make(home) as saver, pytest.raises(CheckpointError, match="step 3 was not saved"):
        saver.finish(3)


def test_a_wait_for_a_save_is_a_slow_phase(home: Path, gate: Gate) -> None:
    """Otherwise the watchdog ends the job before the save's own limit is up."""
    PROGRESS.move("step", 4)
    phases: list[str] = []

    def look() -> None:
        phases.append(PROGRESS.phase)
        gate.opened.set()

    with make(home) as saver:
        saver.save(1, sample(1), {})
        threading.Timer(0.2, look).start()
        saver.finish(1)
    assert (phases, PROGRESS.phase) == (["save"], "step")


@pytest.mark.parametrize("goes_back_to", [0, 1])
def test_a_save_that_hangs_is_given_up_by_a_rollback_behind_it(
    home: Path, gate: Gate, goes_back_to: int
) -> None:
    with make(home, timeout_s=1) as saver:
        saver.save(1, sample(1), {})
        saver.abandon_after(goes_back_to)
        gate.opened.set()
        assert saver.has_saved(1) == (goes_back_to == 1)
        assert (saver.latest() is None) == (goes_back_to == 0)
        saver.save(1, sample(2), {})  # the new course's
        path = saver.finish(1)
        assert path is not None
        load_tensors(path, into := blank(sample(1)))
        assert same_bits(into, sample(2 if goes_back_to == 0 else 1))
