"""A folder of checkpoints outside its run is one run's and no other's."""

import shutil
import uuid
from pathlib import Path

import pytest

from foundling.checkpoint.folders import OWNER, RUN_ID, list_checkpoints, lock_folder
from foundling.checkpoint.paths import checkpoint_root
from foundling.checkpoint.remote import Folder, open_folder
from foundling.config.errors import MissingOrDamagedError, RunError
from foundling.config.run import RunConfig
from foundling.runtime.run_dir import RunDir
from foundling.train.loop import train


@pytest.fixture(params=["disk", "store"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    place = f"memory://{uuid.uuid4().hex}" if request.param == "store" else tmp_path / "saves"
    return open_folder(place) / "run"


def new_run(path: Path) -> RunDir:
    path.mkdir(parents=True)
    return RunDir(path)


def begun(run: RunDir) -> RunDir:
    run.write_info({"status": "running", "parent": None})
    return run


def test_the_first_run_has_the_folder_and_keeps_it(home: Folder, tmp_path: Path) -> None:
    one, other = new_run(tmp_path / "a" / "run"), new_run(tmp_path / "b" / "run")
    lock_folder(one, home)
    lock_folder(one, home)  # cut off before it began
    with pytest.raises(RunError, match=r"another run of this name \(.*a/run on"):
        lock_folder(other, home)
    assert list(other.path.iterdir()) == []
    lock_folder(begun(one), home)


def test_a_moved_run_goes_on_and_a_copied_one_does_not(home: Folder, tmp_path: Path) -> None:
    one = new_run(tmp_path / "a" / "run")
    lock_folder(one, home)
    begun(one)
    moved = RunDir(tmp_path / "moved" / "run")
    shutil.move(one.path, moved.path)
    lock_folder(moved, home)
    shutil.copytree(moved.path, one.path)
    with pytest.raises(RunError, match="is a copy of"):
        lock_folder(one, home)
    lock_folder(moved, home)
    with pytest.raises(MissingOrDamagedError, match="old name"):
        lock_folder(moved, home.with_name("renamed"))


def test_checkpoints_that_say_nothing_are_taken_by_nobody_new(tmp_path: Path) -> None:
    home = tmp_path / "saves" / "run"
    (home / "step-00000006").mkdir(parents=True)
    run = new_run(tmp_path / "run")
    with pytest.raises(RunError, match="not of this run"):
        lock_folder(run, home)
    assert not (run.path / RUN_ID).exists()
    lock_folder(begun(run), home)  # a run of a version that did not say it
    assert (home / OWNER).is_file()
    (home / OWNER).write_text("{")
    with pytest.raises(RunError, match="cannot be read"):
        lock_folder(run, home)


def test_two_trainings_of_one_name_do_not_share_a_folder(tiny: RunConfig, tmp_path: Path) -> None:
    saves = tiny.checkpoint.replace(folder=str(tmp_path / "saves"))
    config = tiny.replace(checkpoint=saves, train={"horizon": 3})
    one, other = RunDir(tmp_path / "a" / "run"), RunDir(tmp_path / "b" / "run")
    train(config, one)
    saved = list_checkpoints(checkpoint_root(one.checkpoints, saves))
    assert saved
    with pytest.raises(RunError, match="another run of this name"):
        train(config, other)
    for path in (other.info_path, other.config_path, other.tokenizer):
        assert not path.exists()
    assert list_checkpoints(checkpoint_root(one.checkpoints, saves)) == saved


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_folder_that_cannot_be_made_is_named_and_nothing_stays(
    has_begun: bool, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    run = new_run(tmp_path / "run")
    run = begun(run) if has_begun else run
    with pytest.raises(RunError, match=r"file/saves cannot be written .*checkpoint\.folder"):
        lock_folder(run, tmp_path / "file" / "saves")
    assert (run.path / RUN_ID).exists() == has_begun
