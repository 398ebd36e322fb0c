"""kill -9 while saving and deleting: the newest whole checkpoint is found, and it is right."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_checks import POINTS, Kill, check, half_done, saver_program
from checkpoint_saver import content

from foundling.checkpoint.writer import save


@pytest.fixture
def kill(tmp_path: Path) -> Iterator[Kill]:
    """Start a saver on `tmp_path` and have it killed as the order says."""
    with saver_program(tmp_path) as send:
        yield send


def test_killed_at_random_moments(tmp_path: Path, kill: Kill) -> None:
    chance = random.Random(11)
    step = 0
    for _ in range(14):
        kill(f"time {chance.uniform(0.005, 0.25):.4f}")
        step = check(tmp_path, at_least=step)
    assert step > 5, "the savers were killed before they came to save"
    # A number may be in use again, but hardly all of them: old leftovers do not pile up.
    save(tmp_path, step + 1, content(step + 1), {"step": step + 1})
    assert len([path for path in tmp_path.iterdir() if "." in path.name]) <= 2
    assert check(tmp_path, at_least=step + 1) == step + 1


def test_killed_at_every_file_operation(tmp_path: Path, kill: Kill) -> None:
    """One save and the deletion after it are about forty operations; each is the last one once."""
    kill("call 130")
    step = check(tmp_path, at_least=2)
    half_way: set[str] = set()
    for call in range(1, 61):
        kill(f"call {call}")
        step = check(tmp_path, at_least=step)
        half_way |= half_done(tmp_path)
    assert {"tmp", "old"} <= half_way, "no kill hit a save or a deletion half way"


def test_killed_at_each_point_of_a_save_behind_the_training(tmp_path: Path) -> None:
    """The CheckpointManager of one process and of two ranks; more of each in the full suite."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    half_way: dict[str, set[str]] = {point: set() for point in POINTS}
    with saver_program(folder) as kill:
        kill("point delete 1")
        step = check(folder, at_least=3)
        chance = random.Random(5)
        for point in POINTS:
            for order in ("point", "point", "ranks"):
                kill(f"{order} {point} {chance.randrange(2, 7)}")
                # Whatever was on the disk when it was killed is still there afterwards.
                step = check(folder, at_least=step)
                half_way[point] |= half_done(folder)
    assert "tmp" in half_way["write"] & half_way["fsync"] & half_way["rename"]
    assert "old" in half_way["delete"]
