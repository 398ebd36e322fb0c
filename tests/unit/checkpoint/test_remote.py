"""Checkpoints behind fsspec: a store without renames, where the manifest is the commit."""

import errno
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from checkpoint_samples import blank, same_bits, sample
from fsspec.implementations.local import LocalFileSystem

from foundling.checkpoint.folders import list_checkpoints
from foundling.checkpoint.manager import CheckpointManager
from foundling.checkpoint.manifest import load_meta, verify
from foundling.checkpoint.paths import checkpoint_root, list_entries
from foundling.checkpoint.reader import load_tensors, tensor_specs
from foundling.checkpoint.remote import RemotePath, open_folder
from foundling.checkpoint.retention import (
    abandon_after,
    latest,
    note_score,
    pin,
    retain,
    scores,
)
from foundling.checkpoint.writer import save
from foundling.config.errors import CheckpointError
from foundling.config.run import CheckpointConfig
from foundling.runtime import files as files_module
from foundling.runtime.dist import World


class ObjectsOnDisk(LocalFileSystem):
    """A store of objects that keeps them on the local disk and cannot rename folders."""

    protocol = "objects"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, str):
            path = path.removeprefix("objects://")
        return super()._strip_protocol(path)

    def unstrip_protocol(self, name: str) -> str:
        return f"objects://{name}"

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        if not options.get("recursive"):
            raise OSError(errno.ENOTSUP, "objects have no names to change")
        self.copy(path1, path2, recursive=True)
        self.rm(path1, recursive=True)


@pytest.fixture(params=["memory", "objects"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RemotePath]:
    if request.param == "memory":
        url = f"memory://{uuid.uuid4().hex}/run"
    else:
        fsspec.register_implementation("objects", ObjectsOnDisk, clobber=True)
        url = f"objects://{tmp_path}/bucket/run"
    found = open_folder(url)
    assert isinstance(found, RemotePath)
    yield found
    found.remove_all()


def files(home: RemotePath) -> set[str]:
    return set(home.store.find(home.path))


def test_a_round_trip(home: RemotePath) -> None:
    for step in (9, 10):
        path = save(home, step, sample(step), {"step": step})
    assert path == home / "step-00000010"
    assert latest(home) == path
    assert [p.name for p in list_checkpoints(home)] == ["step-00000009", "step-00000010"]
    into = blank(sample(10))
    load_tensors(path, into)
    assert same_bits(into, sample(10))
    assert load_meta(path) == {"step": 10}
    assert tensor_specs(path)["model.half"].shape == (33,)
    assert save(home, 10, sample(77), {}) == path, "a whole one is not written again"
    assert same_bits(into, sample(10))


def test_the_same_bytes_as_on_a_disk(home: RemotePath, tmp_path: Path) -> None:
    remote = save(home, 4, sample(4), {"step": 4})
    local = save(tmp_path / "here", 4, sample(4), {"step": 4})
    assert {path.name for path in remote.iterdir()} == {path.name for path in local.iterdir()}
    for path in local.iterdir():
        assert (remote / path.name).read_bytes() == path.read_bytes()


class KilledError(BaseException):
    """Nothing of ours may tidy up after a kill."""


@pytest.mark.parametrize("number", range(1, 40, 6))
def test_torn_at_any_write_it_is_no_checkpoint_and_is_written_anew(
    home: RemotePath, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(home, 1, sample(1), {})
    left = number

    def killed(point: str) -> None:
        nonlocal left
        left -= point == "write"
        if left == 0:
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(files_module, "failpoint", killed)
        patch.setattr("foundling.checkpoint.folders.discard", lambda _: None)
        with pytest.raises(KilledError):
            save(home, 2, sample(2), {})
    assert not (home / "step-00000002" / "manifest.json").exists()
    assert latest(home) == home / "step-00000001"
    save(home, 2, sample(2), {})
    into = blank(sample(2))
    load_tensors(home / "step-00000002", into)
    assert same_bits(into, sample(2))
    assert not [name for name in files(home) if "damaged" in name]


def test_a_failed_save_leaves_nothing(home: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    save(home, 1, sample(1), {})
    before = files(home)

    def full(point: str) -> None:
        if point == "rename":  # the last moment: the manifest is there already
            raise OSError(errno.EDQUOT, "Quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(files_module, "failpoint", full)
        with pytest.raises(CheckpointError, match="Quota exceeded"):
            save(home, 2, sample(2), {})
    assert files(home) == before


def test_a_flipped_bit_is_noticed_and_the_one_before_used(
    home: RemotePath, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        save(home, step, sample(step), {})
    file = home / "step-00000002" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 8
    file.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match="fails its checksum"):
        verify(home / "step-00000002")
    assert latest(home) == home / "step-00000001"
    assert f"warning: checkpoint {home / 'step-00000002'}" in capsys.readouterr().err
    assert save(home, 2, sample(2), {}) == home / "step-00000002"
    assert latest(home) == home / "step-00000002"
    kept = [name for name in files(home) if "step-00000002.damaged-1" in name]
    assert len(kept) == 4


def test_a_missing_and_an_extra_file_are_named(home: RemotePath) -> None:
    path = save(home, 1, sample(1), {})
    (path / "other").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="other does not belong"):
        verify(path)
    (path / "other").unlink()
    (path / "meta.json").unlink()
    with pytest.raises(CheckpointError, match=r"meta\.json is missing"):
        verify(path)


def test_rules_pins_and_scores(home: RemotePath) -> None:
    for step in range(1, 7):
        save(home, step, {"a": torch.tensor(step)}, {})
    note_score(home, 2, 0.5)
    pin(home, 3)
    (home / "step-00000006" / "manifest.json").unlink()  # torn: not counted
    retain(home, CheckpointConfig(keep=1, keep_best=1))
    assert [path.name for path in list_checkpoints(home)] == [
        f"step-{step:08d}" for step in (2, 3, 5, 6)
    ]
    assert scores(home) == {2: 0.5}
    states = {entry.step: entry.state for entry in list_entries(home)}
    assert states == {2: "unverified", 3: "unverified", 5: "unverified", 6: "damaged"}
    save(home, 7, {"a": torch.tensor(7)}, {})
    retain(home, CheckpointConfig(keep=1))
    assert [path.name for path in list_checkpoints(home)] == ["step-00000003", "step-00000007"]


def test_the_marker_goes_before_the_rest(home: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save(home, step, sample(step), {})
    passed = []

    def killed(point: str) -> None:
        passed.append(point)
        if passed == ["delete", "delete"]:
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(files_module, "failpoint", killed)
        with pytest.raises(KilledError):
            retain(home, CheckpointConfig(keep=1))
    assert not (home / "step-00000001" / "manifest.json").exists()
    assert (home / "step-00000001" / "__0_0.distcp").exists()
    assert latest(home) == home / "step-00000002"


def test_a_rollback_sets_aside(home: RemotePath) -> None:
    for step in (1, 2):
        save(home, step, sample(step), {})
    (moved,) = abandon_after(home, 1)
    assert moved.name == "step-00000002.abandoned-1"
    assert latest(home) == home / "step-00000001"


def test_a_saver_writes_behind_the_training(tmp_path: Path) -> None:
    bucket = f"memory://{uuid.uuid4().hex}"
    config = CheckpointConfig(folder=bucket, keep=1)
    run_checkpoints = tmp_path / "my run" / "checkpoints"
    home = checkpoint_root(run_checkpoints, config)
    assert str(home) == f"{bucket.replace('memory://', 'memory:///')}/my run"
    with CheckpointManager(run_checkpoints, config, World()) as saver:
        for step in (1, 2):
            tensors = sample(step)
            saver.save(step, tensors, {"step": step})
            for tensor in tensors.values():
                tensor.zero_()
        path = saver.finish()
        assert path == home / "step-00000002"
    assert not run_checkpoints.exists()
    assert [p.name for p in list_checkpoints(home)] == ["step-00000002"]
    into = blank(sample(2))
    load_tensors(path, into)
    assert same_bits(into, sample(2))


def test_another_disk_is_an_ordinary_folder(tmp_path: Path) -> None:
    run = tmp_path / "run" / "checkpoints"
    for place in (str(tmp_path / "scratch"), f"file://{tmp_path}/scratch"):
        home = checkpoint_root(run, CheckpointConfig(folder=place))
        assert home == tmp_path / "scratch" / "run"
    assert checkpoint_root(run, CheckpointConfig()) == run


@pytest.mark.parametrize(
    ("url", "words"),
    [("nonsense://x/y", "scheme that is not known"), ("dropbox://x/y", r"foundling\[remote\]")],
)
def test_a_store_that_cannot_be_opened_is_one_sentence(url: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        open_folder(url)
