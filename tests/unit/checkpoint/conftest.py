"""A folder with two checkpoints, and one that is under attack."""

import os
from collections.abc import Iterator
from pathlib import Path

import hostile_scene
import pytest
from checkpoint_samples import sample
from hostile_scene import Scene

from foundling.checkpoint.writer import save


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Whole checkpoints of steps 9 and 10."""
    place = tmp_path / "checkpoints"
    for step in (9, 10):
        save(place, step, sample(step), {"step": step, "note": f"of {step}"})
    return place


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path, tmp_path / "run" / "checkpoints")
    for step in (9, 10):
        save(scene.folder, step, sample(step), {"step": step})
    scene.secret.parent.mkdir()
    scene.secret.write_bytes(b"not yours")
    hostile_scene.watching.append(scene)
    yield scene
    hostile_scene.watching.clear()
    assert not scene.trap.exists(), "the hostile code ran"
    assert scene.secret.read_bytes() == b"not yours"
    assert os.listdir(scene.secret.parent) == ["secret"]
    assert scene.opened == [], "something outside was opened"
