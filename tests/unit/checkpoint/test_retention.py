"""Which one is newest, and which may be deleted."""

import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_samples import sample
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foundling.checkpoint import folders
from foundling.checkpoint.folders import list_checkpoints
from foundling.checkpoint.manifest import verify
from foundling.checkpoint.retention import VerifiedCache, latest, retain
from foundling.checkpoint.writer import save
from foundling.config.errors import CheckpointError
from foundling.config.run import CheckpointConfig


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step, name in [(9, "step-9"), (10, "step-10"), (8, "step-00000008"), (11, "step-011")]:
        save(tmp_path, step, sample(step), {}).rename(tmp_path / name)
    assert [folders.step_of(path) for path in list_checkpoints(tmp_path)] == [8, 9, 10, 11]
    assert latest(tmp_path) == tmp_path / "step-011"
    shutil.rmtree(tmp_path / "step-011")
    assert latest(tmp_path) == tmp_path / "step-10"


def test_what_is_not_a_checkpoints_name_is_ignored(folder: Path) -> None:
    for name in ("step-00000011.tmp-1", "step-00000012.old-1", "step-00000013.damaged-1", "step-x"):
        shutil.copytree(folder / "step-00000010", folder / name)
    (folder / "step-00000099").write_text("a file")
    assert latest(folder) == folder / "step-00000010"


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(5):
        save(tmp_path, step, sample(step), {})
    retain(tmp_path, CheckpointConfig(keep=2))
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    retain(tmp_path, CheckpointConfig(keep=2))
    assert len(names(tmp_path)) == 2


def test_one_is_always_kept(folder: Path) -> None:
    retain(folder, CheckpointConfig(keep=1))
    retain(folder, CheckpointConfig(keep=1))
    assert names(folder) == ["step-00000010"]


def test_a_torn_one_is_not_counted(folder: Path) -> None:
    save(folder, 11, sample(11), {})
    (folder / "step-00000011" / "manifest.json").unlink()
    retain(folder, CheckpointConfig(keep=1))
    assert names(folder) == ["step-00000010", "step-00000011"]
    save(folder, 12, sample(12), {})
    retain(folder, CheckpointConfig(keep=1))
    assert names(folder) == ["step-00000012"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(whole=st.lists(st.booleans(), max_size=6), keep=st.integers(min_value=1, max_value=4))
def test_whatever_is_broken_the_newest_whole_ones_stay(
    tmp_path_factory: pytest.TempPathFactory, whole: list[bool], keep: int
) -> None:
    folder = tmp_path_factory.mktemp("keep")
    for step, good in enumerate(whole):
        path = save(folder, step, {"a": torch.tensor(step)}, {})
        if not good:
            (path / "meta.json").write_text("[]")
    expected = [step for step, good in enumerate(whole) if good][-keep:]
    retain(folder, CheckpointConfig(keep=keep))
    left = list_checkpoints(folder)
    assert [folders.step_of(path) for path in left if VerifiedCache().is_whole(path)] == expected
    oldest_kept = expected[0] if len(expected) == keep else -1
    assert all((folders.step_of(path) or 0) >= oldest_kept for path in left)
    broken = [step for step, good in enumerate(whole) if not good and step > oldest_kept]
    assert [folders.step_of(path) for path in left] == sorted(expected + broken)


def test_a_kill_while_deleting_leaves_nothing_that_looks_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(BaseException):
        pass

    def killed(*_: object, **__: object) -> None:
        if any(path.name.startswith("step-00000009.old") for path in folder.iterdir()):
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KilledError):
            retain(folder, CheckpointConfig(keep=1))
    leftover = [path for path in folder.iterdir() if ".old-" in path.name]
    assert len(leftover) == 1
    assert not (leftover[0] / "manifest.json").exists()
    assert (leftover[0] / "__0_0.distcp").exists()
    assert latest(folder) == folder / "step-00000010"
    save(folder, 11, sample(11), {})
    assert names(folder) == ["step-00000010", "step-00000011"]


def test_the_reason_is_a_sentence(folder: Path) -> None:
    (folder / "step-00000010" / "meta.json").unlink()
    assert not VerifiedCache().is_whole(folder / "step-00000010")
    with pytest.raises(CheckpointError, match=r"meta\.json is missing\.$"):
        verify(folder / "step-00000010")
