"""Saving and loading: bit-equal, in place, exact names, no overwriting, nothing half done."""

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_samples import blank, same_bits, sample

from foundling.checkpoint import folders, streams
from foundling.checkpoint.folders import list_checkpoints
from foundling.checkpoint.manifest import load_meta, verify
from foundling.checkpoint.reader import load_tensors, tensor_specs
from foundling.checkpoint.retention import latest
from foundling.checkpoint.writer import save
from foundling.config.errors import CheckpointError


def test_a_round_trip_is_bit_equal_and_in_place(folder: Path) -> None:
    wanted = sample(10)
    into = blank(wanted)
    addresses = {name: tensor.data_ptr() for name, tensor in into.items()}
    load_tensors(folder / "step-00000010", into)
    assert same_bits(into, wanted)
    assert {name: tensor.data_ptr() for name, tensor in into.items()} == addresses
    assert not same_bits(into, sample(9))


def test_parameters_that_need_gradients_are_filled(tmp_path: Path) -> None:
    source = torch.nn.Linear(3, 2)
    target = torch.nn.Linear(3, 2)
    path = save(tmp_path, 1, dict(source.named_parameters()), {})
    load_tensors(path, dict(target.named_parameters()))
    assert torch.equal(source.weight, target.weight)
    assert target.weight.requires_grad


def test_meta_comes_back_as_it_was(tmp_path: Path) -> None:
    meta = {"step": 3, "ledger": {"tokens": 2**60}, "text": "Grüße\n", "lr": 0.1, "parent": None}
    assert load_meta(save(tmp_path, 3, sample(3), meta)) == meta


def test_specs_say_shape_and_dtype(folder: Path) -> None:
    specs = tensor_specs(folder / "step-00000010")
    assert specs == {name: (tuple(t.shape), t.dtype) for name, t in sample(10).items()}


def test_the_same_tensors_give_the_same_bytes_anywhere(tmp_path: Path) -> None:
    one = save(tmp_path / "a", 4, sample(4), {"step": 4})
    two = save(tmp_path / "elsewhere" / "b", 4, sample(4), {"step": 4})
    for file in one.iterdir():
        assert file.read_bytes() == (two / file.name).read_bytes()
        assert str(tmp_path).encode() not in file.read_bytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.update({f"new.{i}": torch.ones(1) for i in range(5)}), "lacks new.0, new.1"),
        (lambda t: t.pop("model.half"), "has model.half, which nobody asked for"),
        (
            lambda t: t.update({"model.half": torch.ones(33)}),
            "stored bfloat16 [33], wanted float32",
        ),
        (lambda t: t.update({"model.half": t["model.half"][:5]}), "wanted bfloat16 [5]"),
    ],
)
def test_another_shape_is_refused_by_name(folder: Path, change: Any, words: str) -> None:
    into = blank(sample(10))
    change(into)
    before = {name: tensor.clone() for name, tensor in into.items()}
    with pytest.raises(CheckpointError) as caught:
        load_tensors(folder / "step-00000010", into)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert same_bits(into, before)


def test_a_long_list_of_differences_is_cut(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lacks a, b, c and 2 more\."):
        load_tensors(folder / "step-00000010", {name: torch.ones(1) for name in "abcde"})


def test_only_tensors_and_plain_json_are_taken(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="tensors only"):
        save(tmp_path, 1, {"a": [1, 2]}, {})  # type: ignore[dict-item]
    with pytest.raises(ValueError):
        save(tmp_path, 1, {"a": torch.ones(1)}, {"loss": float("nan")})
    with pytest.raises(ValueError, match="step 2"):
        save(tmp_path, 1, {"a": torch.ones(1)}, {"step": 2})
    assert list(tmp_path.iterdir()) == []


def test_a_whole_checkpoint_is_never_written_again(folder: Path) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in (folder / "step-00000010").iterdir()}
    path = save(folder, 10, sample(77), {"step": 10})
    assert path == folder / "step-00000010"
    assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == before
    assert len(list(folder.iterdir())) == 2


def test_the_same_step_is_found_under_another_padding(tmp_path: Path) -> None:
    save(tmp_path, 7, sample(7), {}).rename(tmp_path / "step-7")
    assert save(tmp_path, 7, sample(8), {}) == tmp_path / "step-7"
    assert [path.name for path in tmp_path.iterdir()] == ["step-7"]


def test_a_damaged_one_is_moved_aside_and_written_anew(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (1, 2):
        (folder / "step-00000010" / "meta.json").write_text("{}")
        assert save(folder, 10, sample(10), {"step": 10}) == folder / "step-00000010"
        verify(folder / "step-00000010")
        aside = folder / f"step-00000010.damaged-{number}"
        assert (aside / "meta.json").read_text() == "{}"
    assert "step-00000010.damaged-2" in capsys.readouterr().err
    assert latest(folder) == folder / "step-00000010"


def test_leftovers_of_the_dead_are_swept_and_the_living_left_alone(folder: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    living = folder / f"step-00000011.tmp-{child.pid}"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    swept = [
        folder / f"step-00000011.tmp-{dead.pid}",
        folder / f"step-00000008.old-{dead.pid}",
        folder / f"step-00000012.tmp-{os.getpid()}",  # a number used again, as in a container
        folder / f"step-00000005.tmp-{10**30}",
    ]
    other = folder / "notes.tmp-1"
    for path in (living, other, *swept):
        path.mkdir()
        (path / "__0_0.distcp").write_bytes(b"half")
    try:
        save(folder, 12, sample(12), {})
        assert living.exists()
        assert other.exists()
        assert not any(path.exists() for path in swept)
        assert [p.name for p in list_checkpoints(folder)] == [
            "step-00000009",
            "step-00000010",
            "step-00000012",
        ]
    finally:
        child.communicate(b"\n")


class _FullDisk:
    """A file that takes `room` bytes and then says that the disk is full."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: Any) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(self.file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 100, 3000, 8000])
def test_a_full_disk_costs_nothing_but_the_new_save(
    folder: Path, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = streams.HashingStream.__init__
    with monkeypatch.context() as patch:
        patch.setattr(
            streams.HashingStream,
            "__init__",
            lambda self, file: plain(self, _FullDisk(file, room)),  # type: ignore[arg-type]
        )
        with pytest.raises(CheckpointError, match=r"step 11 could not be .* No space left"):
            save(folder, 11, sample(11), {})
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000009", "step-00000010"]
    assert latest(folder) == folder / "step-00000010"
    assert save(folder, 11, sample(11), {}) == latest(folder)


@pytest.mark.parametrize("call", ["fsync", "rename", "replace_folder", "fsync_dir", "mkdir"])
def test_a_failing_system_call_leaves_no_half_folder(
    folder: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        target: Any = {"fsync": os, "rename": os, "mkdir": Path}.get(call, folders)
        patch.setattr(target, call, fail)
        with pytest.raises(CheckpointError, match="Input/output error"):
            save(folder, 11, sample(11), {})
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000009", "step-00000010"]


def test_a_file_size_limit_of_the_system_is_one_sentence(folder: Path) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))
        with pytest.raises(CheckpointError, match="File too large"):
            save(folder, 11, {"a": torch.zeros(100_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000009", "step-00000010"]


def test_what_the_disk_returns_is_compared_with_what_was_meant(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that stores other bytes than it was given, without a word."""

    class Liar(_FullDisk):
        def write(self, data: Any) -> int:
            wrong = bytearray(data)
            wrong[-1] ^= 1
            return int(self.file.write(wrong))

    plain = streams.HashingStream.__init__
    monkeypatch.setattr(
        streams.HashingStream,
        "__init__",
        lambda self, file: plain(self, Liar(file, 0)),  # type: ignore[arg-type]
    )
    with pytest.raises(CheckpointError, match="fails its checksum"):
        save(folder, 11, sample(11), {})
    assert latest(folder) == folder / "step-00000010"


def test_ctrl_c_in_the_middle_stays_ctrl_c(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(_FullDisk):
        def write(self, data: Any) -> int:
            self.room -= len(data)
            if self.room < 0:
                raise KeyboardInterrupt
            return int(self.file.write(data))

    plain = streams.HashingStream.__init__
    monkeypatch.setattr(
        streams.HashingStream,
        "__init__",
        lambda self, file: plain(self, Interrupted(file, 700)),  # type: ignore[arg-type]
    )
    with pytest.raises(KeyboardInterrupt):
        save(folder, 11, sample(11), {})
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000009", "step-00000010"]


def test_step_numbers_of_names() -> None:
    assert folders.step_of(Path("x/step-00000012")) == 12
    assert folders.step_of(Path("step-7.tmp-99")) == 7
    assert folders.step_of(Path("best")) is None
    assert folders.step_of(Path("step-x")) is None
