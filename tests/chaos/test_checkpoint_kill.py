"""kill -9 while saving and deleting: the newest whole checkpoint is found, and it is right."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_saver import content

from foundling.checkpoint import folders, latest, list_checkpoints, load_meta, load_tensors, save
from foundling.checkpoint.seal import is_whole

Kill = Callable[[str], None]


@pytest.fixture
def kill(tmp_path: Path) -> Iterator[Kill]:
    """Start a saver on `tmp_path` and have it killed as the order says."""
    program = Path(__file__).with_name("checkpoint_saver.py")
    process = subprocess.Popen(
        [sys.executable, str(program), str(tmp_path)],
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
        assert answers.readline() == "killed\n"

    yield send
    orders.close()
    answers.close()
    assert process.wait(timeout=60) == 0


def check(folder: Path, at_least: int) -> int:
    """Everything under a checkpoint's name is whole, and the newest holds its step's bits."""
    for path in list_checkpoints(folder):
        assert is_whole(path), path
    newest = latest(folder)
    if newest is None:
        assert at_least == 0
        return 0
    step = folders.step_of(newest)
    assert step is not None
    assert step >= at_least
    assert load_meta(newest) == {"step": step}
    wanted = content(step)
    into = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    load_tensors(newest, into)
    assert all(torch.equal(into[name], wanted[name]) for name in wanted)
    return step


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
        half_way.update(
            path.name.partition(".")[2].partition("-")[0] for path in tmp_path.iterdir()
        )
    assert {"tmp", "old"} <= half_way, "no kill hit a save or a deletion half way"
