"""Checkpoints from a stranger: none runs code, writes or reads outside, or fills the memory.

Each attack is made as well as its format allows, checksums included; `scene` looks whether one of
them worked.
"""

import io
import os
import pickle
import resource
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_samples import blank, sample
from hostile_scene import Runs, Scene, refused

from foundling.checkpoint.manifest import (
    CheckpointManifest,
    FileDigest,
    load_meta,
    read_manifest,
    write_durably,
    write_manifest,
)
from foundling.checkpoint.paths import find_checkpoint
from foundling.checkpoint.reader import load_tensors
from foundling.checkpoint.retention import latest, retain
from foundling.checkpoint.writer import save
from foundling.cli.main import run_verb
from foundling.config.run import CheckpointConfig


def reseal(path: Path, changed: dict[str, bytes]) -> None:
    """Replace files and make all checksums fit."""
    manifest = read_manifest(path)
    files = dict(manifest.files)
    for name, content in changed.items():
        (path / name).unlink(missing_ok=True)
        files[name] = write_durably(path / name, content)
    (path / "manifest.json").unlink()
    write_manifest(path, CheckpointManifest(manifest.step, files))


def edit_index(path: Path, edit: Callable[[Any], None]) -> bytes:
    index = pickle.loads((path / ".metadata").read_bytes())
    edit(index)
    return pickle.dumps(index)


def load(path: Path) -> None:
    load_tensors(path, blank(sample(10)))


def test_a_pickle_in_the_index(scene: Scene) -> None:
    reseal(scene.newest, {".metadata": pickle.dumps(Runs(scene.trap))})
    refused(lambda: load(scene.newest), "it names posix.mkdir")


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_pickle_behind_a_key_of_the_index(scene: Scene, protocol: int) -> None:
    index = pickle.loads((scene.newest / ".metadata").read_bytes())
    index.planner_data = {"x": Runs(scene.trap)}
    reseal(scene.newest, {".metadata": pickle.dumps(index, protocol=protocol)})
    refused(lambda: load(scene.newest), "not to be trusted")


def test_a_walk_from_an_allowed_name_to_a_forbidden_one(scene: Scene) -> None:
    """STACK_GLOBAL takes dotted names: torch.serialization._get_layout.__globals__ ..."""
    for name in ("os.system", "_get_layout.__globals__", "_get_layout.__builtins__"):
        word, module = name.encode(), b"torch.serialization"
        program = b"\x80\x04" + bytes([0x8C, len(module)]) + module
        program += bytes([0x8C, len(word)]) + word + b"\x93."
        reseal(scene.newest, {".metadata": program})
        refused(lambda: load(scene.newest), "it names torch.serialization")


def test_bytes_among_the_tensors(scene: Scene) -> None:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    hostile = io.BytesIO()
    torch.save(Runs(scene.trap), hostile)
    data = (scene.newest / "__0_0.distcp").read_bytes()

    def add(index: Any) -> None:
        index.state_dict_metadata["model.half"] = BytesStorageMetadata()
        for key, info in index.storage_data.items():
            if key.fqn == "model.half":
                info.offset, info.length = len(data), len(hostile.getvalue())

    changed = {".metadata": edit_index(scene.newest, add)}
    reseal(scene.newest, {**changed, "__0_0.distcp": data + hostile.getvalue()})
    refused(lambda: load(scene.newest), "model.half holds bytes")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_in_the_place_of_a_tensor(scene: Scene, zipped: bool) -> None:
    hostile = io.BytesIO()
    torch.save(Runs(scene.trap), hostile, _use_new_zipfile_serialization=zipped)
    put_in_place_of_a_tensor(scene, hostile.getvalue())
    refused(lambda: load(scene.newest), "could not be loaded")


def put_in_place_of_a_tensor(scene: Scene, content: bytes) -> None:
    data = (scene.newest / "__0_0.distcp").read_bytes()

    def point_there(index: Any) -> None:
        for info in index.storage_data.values():
            info.offset, info.length = len(data), len(content)

    changed = {".metadata": edit_index(scene.newest, point_there)}
    reseal(scene.newest, {**changed, "__0_0.distcp": data + content})


@pytest.mark.parametrize("name", ["../../../neighbour/secret", "{secret}", "..", "a/../b"])
def test_a_manifest_that_names_files_outside(scene: Scene, name: str) -> None:
    name = name.format(secret=scene.secret)
    manifest = read_manifest(scene.newest)
    (scene.newest / "manifest.json").unlink()
    write_manifest(
        scene.newest, CheckpointManifest(10, {**manifest.files, name: FileDigest(9, "0" * 64)})
    )
    refused(lambda: load(scene.newest), "manifest.json was changed")
    assert latest(scene.folder) == scene.folder / "step-00000009"


@pytest.mark.parametrize("name", ["../../../neighbour/secret", "{secret}"])
def test_an_index_that_names_files_outside(scene: Scene, name: str) -> None:
    def point_outside(index: Any) -> None:
        for info in index.storage_data.values():
            info.relative_path = name.format(secret=scene.secret)

    reseal(scene.newest, {".metadata": edit_index(scene.newest, point_outside)})
    refused(lambda: load(scene.newest), "outside the checkpoint")


@pytest.mark.parametrize("name", ["__0_0.distcp", "meta.json", ".metadata", "manifest.json"])
def test_a_link_to_a_file_outside(scene: Scene, name: str) -> None:
    (scene.newest / name).unlink()
    (scene.newest / name).symlink_to(scene.secret)
    refused(lambda: load(scene.newest), "not a plain file")
    assert latest(scene.folder) == scene.folder / "step-00000009"


def test_links_among_what_is_swept_and_deleted(scene: Scene) -> None:
    outside = scene.secret.parent
    for name in ("step-00000001", "step-00000002.tmp-1", "step-00000003.old-1"):
        (scene.folder / name).symlink_to(outside)
    save(scene.folder, 11, sample(11), {})
    retain(scene.folder, CheckpointConfig(keep=1))
    assert latest(scene.folder) == scene.folder / "step-00000011"
    assert not (scene.folder / "step-00000001").is_symlink()


def bomb(size: int) -> bytes:
    """A tensor's archive of a few kilobytes that unpacks to `size` zeros."""
    plain, packed = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(33, dtype=torch.bfloat16), plain)
    with (
        zipfile.ZipFile(plain) as source,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for record in source.infolist():
            content = source.read(record)
            target.writestr(
                record.filename, bytes(size) if "/data/" in record.filename else content
            )
    return packed.getvalue()


def test_an_archive_that_unpacks_to_a_thousand_times_its_size(scene: Scene) -> None:
    content = bomb(64 << 20)
    assert len(content) < 1 << 20
    put_in_place_of_a_tensor(scene, content)
    refused(lambda: load(scene.newest), "compressed archive")


@pytest.mark.parametrize("name", ["meta.json", "manifest.json", ".metadata"])
def test_a_file_of_a_terabyte_that_takes_no_room(scene: Scene, name: str) -> None:
    os.truncate(scene.newest / name, 1 << 40)
    refused(lambda: load(scene.newest))
    refused(lambda: load_tensors(scene.newest, blank(sample(10)), check=name != ".metadata"))
    if name != ".metadata":
        refused(lambda: load_meta(scene.newest))


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x04Nr\xff\xff\xff\x7f.",  # note the 2,147,483,647th thing
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x.",  # a terabyte of bytes follows
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
        b"\x80\x04\x8b" + struct.pack("<I", (1 << 31) - 1) + b"x.",  # a number of two gigabytes
    ],
)
def test_an_index_that_asks_for_memory(scene: Scene, program: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reseal(scene.newest, {".metadata": program})
    refused(lambda: load(scene.newest), "not to be trusted")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def test_a_tensor_that_is_said_to_be_huge(scene: Scene) -> None:
    def grow(index: Any) -> None:
        index.state_dict_metadata["model.half"].size = torch.Size([1 << 50])

    reseal(scene.newest, {".metadata": edit_index(scene.newest, grow)})
    refused(lambda: load(scene.newest), "do not make up the whole")


@pytest.mark.parametrize("text", ["[" * 200_000, "[1]", "NaN" * 3, '{"step": 10', "\x00"])
def test_a_meta_that_is_no_meta(scene: Scene, text: str) -> None:
    reseal(scene.newest, {"meta.json": text.encode()})
    refused(lambda: load_meta(scene.newest), "not to be trusted")


@pytest.mark.parametrize("verb", ["chat", "eval", "runs verify", "runs show"])
def test_a_pt_file_in_the_place_of_a_run(scene: Scene, verb: str) -> None:
    torch.save(Runs(scene.trap), scene.root / "model.pt")
    (scene.root / "folder").mkdir()
    shutil.copy(scene.root / "model.pt", scene.root / "folder" / "consolidated.00.pth")
    for place in ("model.pt", "folder"):
        refused(lambda place=place: run_verb([*verb.split(), str(scene.root / place)]))
        refused(lambda place=place: find_checkpoint(scene.root / place))
