"""Damage of every kind is noticed, named and passed over, and hostile files run nothing."""

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.metadata as dcp_metadata
from checkpoint_samples import blank, same_bits, sample
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from foundling.checkpoint.manifest import (
    CheckpointManifest,
    FileDigest,
    load_meta,
    read_manifest,
    verify,
    write_durably,
    write_manifest,
)
from foundling.checkpoint.reader import load_tensors, tensor_specs
from foundling.checkpoint.retention import latest
from foundling.checkpoint.writer import save
from foundling.config.errors import CheckpointError


def expect_passed_over(folder: Path) -> str:
    """The newest is refused in one sentence, and the one before it loads bit for bit."""
    newest = folder / "step-00000010"
    with pytest.raises(CheckpointError) as caught:
        verify(newest)
    assert [str(newest) in line for line in str(caught.value).splitlines()] == [True]
    with pytest.raises(CheckpointError):
        load_tensors(newest, blank(sample(10)))
    found = latest(folder)
    assert found == folder / "step-00000009"
    into = blank(sample(9))
    load_tensors(found, into)
    assert same_bits(into, sample(9))
    return str(caught.value)


def test_a_flipped_bit_anywhere_is_noticed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(1)
    files = sorted((folder / "step-00000010").iterdir())
    for trial in range(60):
        file = files[trial % len(files)]
        whole = file.read_bytes()
        broken = bytearray(whole)
        place = chance.randrange(len(whole))
        broken[place] ^= 1 << chance.randrange(8)
        file.write_bytes(broken)
        expect_passed_over(folder)
        assert f"warning: checkpoint {folder / 'step-00000010'}" in capsys.readouterr().err
        file.write_bytes(whole)
    assert latest(folder) == folder / "step-00000010"


def test_every_bit_of_the_manifest_counts(folder: Path) -> None:
    file = folder / "step-00000010" / "manifest.json"
    whole = file.read_bytes()
    for place in range(len(whole)):
        broken = bytearray(whole)
        broken[place] ^= 1 << (place % 8)
        file.write_bytes(broken)
        with pytest.raises(CheckpointError):
            verify(folder / "step-00000010")


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "meta.json", "manifest.json"])
@pytest.mark.parametrize("left", [0, 1, 0.5, -1])
def test_a_truncated_file_is_noticed(folder: Path, name: str, left: float) -> None:
    file = folder / "step-00000010" / name
    size = file.stat().st_size
    os.truncate(file, int(size * left) if left == 0.5 else int(left) % size)
    expect_passed_over(folder)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "meta.json", "manifest.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / "step-00000010" / name).unlink()
    assert name in expect_passed_over(folder)


def test_a_file_too_many_is_named(folder: Path) -> None:
    (folder / "step-00000010" / "__1_0.distcp").write_bytes(b"from another world size")
    assert "__1_0.distcp does not belong to it" in expect_passed_over(folder)


def swap(one: Path, other: Path) -> None:
    a, b = one.read_bytes(), other.read_bytes()
    one.write_bytes(b)
    other.write_bytes(a)


@pytest.mark.parametrize("name", ["__0_0.distcp", "meta.json", "manifest.json"])
def test_a_file_of_another_checkpoint_is_noticed(folder: Path, name: str) -> None:
    save(folder, 8, sample(8), {"step": 8, "note": "of 8"})
    swap(folder / "step-00000010" / name, folder / "step-00000008" / name)
    expect_passed_over(folder)
    with pytest.raises(CheckpointError):
        verify(folder / "step-00000008")


def test_files_swapped_within_a_checkpoint_are_noticed(folder: Path) -> None:
    swap(folder / "step-00000010" / ".metadata", folder / "step-00000010" / "meta.json")
    expect_passed_over(folder)


def test_a_folder_under_another_steps_name_is_noticed(folder: Path) -> None:
    shutil.rmtree(folder / "step-00000010")
    shutil.copytree(folder / "step-00000009", folder / "step-00000010")
    assert "is of step 9" in expect_passed_over(folder)


def test_a_copy_under_a_free_name_is_fine(folder: Path) -> None:
    shutil.copytree(folder / "step-00000009", folder.parent / "best")
    verify(folder.parent / "best")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda tree: tree.update(step=11), "was changed"),
        (lambda tree: tree.update(schema=2), "has schema 2 and this version reads 1"),
        (lambda tree: tree.pop("schema"), "has schema None"),
        (lambda tree: tree.pop("digest"), "was changed"),
        (lambda tree: tree.update(extra=1), "was changed"),
        (lambda tree: tree["files"].pop("meta.json"), "was changed"),
        (lambda tree: tree["files"]["meta.json"].update(size=1), "was changed"),
        (lambda tree: tree["files"].update({"meta.json": 3}), "was changed"),
        (lambda tree: tree.update(files=[]), "was changed"),
    ],
)
def test_an_edited_manifest_is_noticed(
    folder: Path, edit: Callable[[dict[str, Any]], None], words: str
) -> None:
    file = folder / "step-00000010" / "manifest.json"
    tree = json.loads(file.read_text())
    edit(tree)
    file.write_text(json.dumps(tree, indent=2) + "\n")
    assert words in expect_passed_over(folder)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"', "{}", "[" * 100_000, "\xff", "{"])
def test_a_manifest_that_is_something_else_is_noticed(folder: Path, text: str) -> None:
    (folder / "step-00000010" / "manifest.json").write_text(text, encoding="latin-1")
    expect_passed_over(folder)


def test_other_spacing_of_the_manifest_is_an_edit(folder: Path) -> None:
    file = folder / "step-00000010" / "manifest.json"
    file.write_text(file.read_text().replace("  ", " "))
    assert "was changed" in expect_passed_over(folder)


def test_a_link_to_elsewhere_is_refused(folder: Path, tmp_path: Path) -> None:
    file = folder / "step-00000010" / "__0_0.distcp"
    file.rename(tmp_path / "moved")
    file.symlink_to(tmp_path / "moved")
    assert "not a plain file" in expect_passed_over(folder)


def test_a_changed_meta_is_not_read(folder: Path) -> None:
    (folder / "step-00000010" / "meta.json").write_text('{"step": 11}')
    with pytest.raises(CheckpointError, match=r"meta\.json has 12 bytes"):
        load_meta(folder / "step-00000010")


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        verify(tmp_path / "step-00000001")
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nowhere") is None


def test_nothing_whole_is_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in folder.iterdir():
        (path / "manifest.json").unlink()
    assert latest(folder) is None
    errors = capsys.readouterr().err
    assert "step-00000009" in errors
    assert "step-00000010" in errors


# Hostile content: the attacker knows the format and writes the manifest anew, so that every
# checksum is right.


def reseal(path: Path, changed: str, content: bytes) -> None:
    """Replace one file and make all checksums fit."""
    manifest = read_manifest(path)
    (path / changed).unlink(missing_ok=True)
    files = {**manifest.files, changed: write_durably(path / changed, content)}
    (path / "manifest.json").unlink()
    write_manifest(path, CheckpointManifest(manifest.step, files))
    verify(path)


class Runs:
    """Leaves a trace if anybody unpickles it."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


def hidden_in(index: Any, hostile: object, place: str) -> Any:
    if place == "alone":
        return hostile
    if place == "planner data":
        index.planner_data = hostile
    elif place == "storage meta":
        index.storage_meta = hostile
    elif place == "size":
        index.state_dict_metadata["model.half"].size = hostile
    elif place == "key":
        index.state_dict_metadata[hostile] = index.state_dict_metadata.pop("model.half")
    return index


@pytest.mark.parametrize("place", ["alone", "planner data", "storage meta", "size", "key"])
@pytest.mark.parametrize("function", [os.mkdir, exec, eval, shutil.rmtree])
def test_a_pickle_hidden_in_the_index_does_not_run(
    folder: Path, tmp_path: Path, place: str, function: Any
) -> None:
    path = folder / "step-00000010"
    trace = tmp_path / "trace"
    code = f"__import__('os').mkdir({str(trace)!r})"
    argument = {os.mkdir: str(trace), shutil.rmtree: str(folder / "step-00000009")}
    hostile = Runs(function, argument.get(function, code))
    index = pickle.loads((path / ".metadata").read_bytes())
    reseal(path, ".metadata", pickle.dumps(hidden_in(index, hostile, place)))
    for attempt in (lambda: load_tensors(path, blank(sample(10))), lambda: tensor_specs(path)):
        with pytest.raises(CheckpointError, match="not to be trusted") as caught:
            attempt()
        assert "\n" not in str(caught.value)
    assert not trace.exists()
    verify(folder / "step-00000009")


def test_the_hostile_pickle_of_these_tests_is_real(folder: Path, tmp_path: Path) -> None:
    """Without our reader the same file runs its code, so the tests above test something."""
    path = folder / "step-00000010"
    reseal(path, ".metadata", pickle.dumps(Runs(os.mkdir, str(tmp_path / "trace"))))
    with pytest.warns(UserWarning, match="single process"), pytest.raises(CheckpointException):
        dcp_load({}, checkpoint_id=path, no_dist=True)
    assert (tmp_path / "trace").exists()


def test_an_allowed_class_cannot_be_changed_by_a_pickle(folder: Path) -> None:
    """BUILD with a pair as state sets attributes of whatever is on the stack, a class too."""
    path = folder / "step-00000010"
    module = b"ctorch.distributed.checkpoint.metadata\n"
    program = module + b"Metadata\n(N}S'version'\nS'changed'\nstb."
    reseal(path, ".metadata", program)
    with pytest.raises(CheckpointError, match="not to be trusted"):
        tensor_specs(path)
    assert dcp_metadata.Metadata.version is None
    assert isinstance(tensor_specs(folder / "step-00000009"), dict)


def test_byte_entries_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {"model.a": torch.ones(2)}, {})
    with pytest.warns(UserWarning, match="single process"):
        dcp_save(
            {"model.a": torch.ones(2), "model.b": {"x": 1}},
            storage_writer=FileSystemWriter(path / "other"),
            planner=DefaultSavePlanner(flatten_state_dict=False),
            no_dist=True,
        )
    index = pickle.loads((path / "other" / ".metadata").read_bytes())
    index.storage_meta = None
    data = (path / "other" / "__0_0.distcp").read_bytes()
    shutil.rmtree(path / "other")
    reseal(path, ".metadata", pickle.dumps(index))
    reseal(path, "__0_0.distcp", data)
    with pytest.raises(CheckpointError, match=r"model\.b holds bytes"):
        load_tensors(path, {"model.a": torch.zeros(2)})


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("relative_path", "../x", "outside the checkpoint"),
        ("relative_path", "/x", "outside the checkpoint"),
        ("relative_path", "gone", "gone is missing"),
        ("relative_path", 3, "is no str"),
        ("transform_descriptors", ["zstd"], "transformation"),
        ("offset", "0", "is no int"),
    ],
)
def test_an_index_that_points_astray_is_refused(
    folder: Path, field: str, value: object, words: str
) -> None:
    path = folder / "step-00000010"
    index = pickle.loads((path / ".metadata").read_bytes())
    for info in index.storage_data.values():
        setattr(info, field, value)
    reseal(path, ".metadata", pickle.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        load_tensors(path, blank(sample(10)))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"storage_data": {}}, "nowhere stored"),
        ({"storage_data": None}, "not an index of tensors"),
        ({"state_dict_metadata": {"a": None}}, "is no Record"),
        ({"state_dict_metadata": {3: None}}, "is no str"),
        ({"version": 3}, "is no str"),
    ],
)
def test_an_index_that_is_no_index_is_refused(
    folder: Path, fields: dict[str, Any], words: str
) -> None:
    path = folder / "step-00000010"
    index = pickle.loads((path / ".metadata").read_bytes())
    vars(index).update(fields)
    reseal(path, ".metadata", pickle.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        tensor_specs(path)
    assert words in str(caught.value)


def test_random_bytes_for_an_index_are_refused(folder: Path) -> None:
    path = folder / "step-00000010"
    whole = (path / ".metadata").read_bytes()
    chance = random.Random(2)
    for _ in range(100):
        broken = bytearray(whole)
        for _ in range(chance.randrange(1, 40)):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        reseal(path, ".metadata", bytes(broken))
        try:
            specs = tensor_specs(path)
        except CheckpointError:
            continue
        assert isinstance(specs, dict)


def test_a_pickle_in_place_of_a_tensor_does_not_run(folder: Path, tmp_path: Path) -> None:
    path = folder / "step-00000010"
    data = bytearray((path / "__0_0.distcp").read_bytes())
    hostile = tmp_path / "hostile.pt"
    torch.save(Runs(os.mkdir, str(tmp_path / "trace")), hostile)
    content = hostile.read_bytes()
    index = pickle.loads((path / ".metadata").read_bytes())
    for info in index.storage_data.values():
        info.offset, info.length = len(data), len(content)
    reseal(path, "__0_0.distcp", bytes(data) + content)
    reseal(path, ".metadata", pickle.dumps(index))
    with pytest.raises(CheckpointError, match="could not be loaded") as caught:
        load_tensors(path, blank(sample(10)))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("name", ["../meta.json", "/etc/hostname", "sub/x", "..", "", "."])
def test_a_manifest_that_names_a_file_outside_is_refused(folder: Path, name: str) -> None:
    path = folder / "step-00000010"
    manifest = read_manifest(path)
    (path / "manifest.json").unlink()
    write_manifest(path, CheckpointManifest(10, {**manifest.files, name: FileDigest(1, "00")}))
    assert "was changed" in expect_passed_over(folder)


def test_an_enum_pickled_by_name_is_understood(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python releases differ in how they pickle the member of an enum."""
    path = folder / "step-00000010"
    index = pickle.loads((path / ".metadata").read_bytes())
    kind = dcp_metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(
        kind, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)), raising=False
    )
    content = pickle.dumps(index)
    assert b"getattr" in content
    reseal(path, ".metadata", content)
    into = blank(sample(10))
    load_tensors(path, into)
    assert same_bits(into, sample(10))
