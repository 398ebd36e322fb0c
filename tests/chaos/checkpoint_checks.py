"""What must be true after a kill or a damage; shared by the samples and the full suites."""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from checkpoint_saver import content

from foundling.checkpoint import folders
from foundling.checkpoint.folders import list_checkpoints
from foundling.checkpoint.manifest import (
    CheckpointManifest,
    FileDigest,
    load_meta,
    read_manifest,
    verify,
    write_manifest,
)
from foundling.checkpoint.reader import load_tensors
from foundling.checkpoint.retention import VerifiedCache, latest
from foundling.checkpoint.writer import save
from foundling.config.errors import CheckpointError

Kill = Callable[[str], None]
POINTS = ("stage", "write", "fsync", "rename", "delete")


@contextmanager
def saver_program(folder: Path) -> Iterator[Kill]:
    """Start savers on `folder` and have them killed as the orders say."""
    program = Path(__file__).with_name("checkpoint_saver.py")
    process = subprocess.Popen(
        [sys.executable, str(program), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin
    assert process.stdout
    orders, answers = process.stdin, process.stdout

    def send(order: str) -> None:
        orders.write(order + "\n")
        orders.flush()
        answer = answers.readline()
        assert answer == "killed\n", f"{order}: {answer}"

    try:
        yield send
    finally:
        orders.close()
        answers.close()
        code = process.wait(timeout=60)
    assert code == 0


def check(folder: Path, at_least: int) -> int:
    """Everything under a checkpoint's name is whole, and the newest holds its step's bits."""
    for path in list_checkpoints(folder):
        assert VerifiedCache().is_whole(path), path
    newest = latest(folder)
    if newest is None:
        assert at_least == 0
        return 0
    step = folders.step_of(newest)
    assert step is not None
    assert step >= at_least
    expect_content(newest, step)
    return step


def expect_content(path: Path, step: int) -> None:
    """The checkpoint holds exactly what its step has."""
    assert load_meta(path) == {"step": step}
    wanted = content(step)
    into = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    load_tensors(path, into)
    assert all(torch.equal(into[name], wanted[name]) for name in wanted)


def half_done(folder: Path) -> set[str]:
    """Kinds of what was left half done: tmp, old."""
    return {path.name.partition(".")[2].partition("-")[0] for path in folder.iterdir()} - {""}


# Damage: each takes the newest checkpoint and spoils it in some way.


def flip(path: Path, chance: random.Random) -> None:
    file = chance.choice(sorted(path.iterdir()))
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def truncate(path: Path, chance: random.Random) -> None:
    file = chance.choice(sorted(path.iterdir()))
    os.truncate(file, chance.randrange(file.stat().st_size))


def remove(path: Path, chance: random.Random) -> None:
    chance.choice(sorted(path.iterdir())).unlink()


def swap(path: Path, chance: random.Random) -> None:
    """Two files of the checkpoint, or one and its like in the checkpoint before."""
    names = sorted(entry.name for entry in path.iterdir())
    one, other = path / names[0], path / names[1]
    if chance.random() < 0.5:
        one, other = chance.sample([path / name for name in names], 2)
        a, b = one.read_bytes(), other.read_bytes()
        one.write_bytes(b)
        other.write_bytes(a)
        return
    name = chance.choice([name for name in names if name != ".metadata"])
    before = path.with_name("step-00000001")
    (path / name).write_bytes((before / name).read_bytes())


def stale(path: Path, chance: random.Random) -> None:
    """A manifest of an earlier state: another save of the step, or one file changed since."""
    if chance.random() < 0.5:
        manifest = read_manifest(path)
        name = chance.choice(sorted(manifest.files))
        old = FileDigest(manifest.files[name].size, f"{chance.getrandbits(256):064x}")
        (path / "manifest.json").unlink()
        write_manifest(path, CheckpointManifest(manifest.step, {**manifest.files, name: old}))
        return
    kept = (path / "manifest.json").read_bytes()
    shutil.rmtree(path)
    save(path.parent, 2, {"model.other": torch.randn(60)}, {"step": 2})
    (path / "manifest.json").write_bytes(kept)


def torn(path: Path, chance: random.Random) -> None:
    """As a kill in a store without renames leaves it: some files, the last one half, no marker."""
    (path / "manifest.json").unlink()
    files = sorted(path.iterdir())
    for file in files[chance.randrange(1, len(files)) :]:
        file.unlink()
    last = sorted(path.iterdir())[-1]
    os.truncate(last, chance.randrange(last.stat().st_size + 1))


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "flipped bit": flip,
    "truncated": truncate,
    "missing file": remove,
    "swapped files": swap,
    "stale manifest": stale,
    "torn by a kill": torn,
}


def expect_passed_over(kind: str, template: Path, folder: Path, chance: random.Random) -> None:
    """Damage the newer of two checkpoints: it is refused, never loaded, the one before is used."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder)
    newest = folder / "step-00000002"
    DAMAGES[kind](newest, chance)
    with pytest.raises(CheckpointError):  # no stray OSError
        verify(newest)
    assert not VerifiedCache().is_whole(newest), f"{kind} was not noticed"
    wanted = content(2)
    into = {name: torch.full_like(tensor, 7) for name, tensor in wanted.items()}
    with pytest.raises(CheckpointError):
        load_tensors(newest, into)
    assert all(bool((tensor == 7).all()) for tensor in into.values()), f"{kind}: partly loaded"
    used = latest(folder)
    assert used == folder / "step-00000001", f"{kind}: {used}"
    expect_content(used, 1)


def damage_template(folder: Path) -> Path:
    """Two whole checkpoints to be damaged again and again."""
    for step in (1, 2):
        save(folder, step, content(step), {"step": step})
    return folder
