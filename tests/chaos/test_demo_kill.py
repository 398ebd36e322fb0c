"""Promise 1 on the whole walk: killed anywhere and started again, it is the same life.

The demo that nobody disturbs is run by the wheel, outside the checkout: what is shipped is whole.
"""

import hashlib
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from compare_runs import assert_same_run
from killed_demo import run_demo, run_killed

KILLS = 2
ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The package as a user has it: its wheel, installed in a folder."""
    source, wheels, folder = (tmp_path / name for name in ("source", "wheels", "installed"))
    shutil.copytree(ROOT / "foundling", source / "foundling")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(source)]
    subprocess.run([*pip, *build], check=True)
    (wheel,) = wheels.iterdir()
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder), str(wheel)], check=True)
    return folder


@pytest.mark.timeout(600)
def test_a_demo_that_is_killed_ends_the_same(tmp_path: Path, installed: Path) -> None:
    where = [sys.executable, "-c", "import foundling; print(foundling.__file__)"]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    found = subprocess.run(where, env=environment, cwd=installed, capture_output=True, text=True)
    assert found.stdout.startswith(str(installed))
    whole_s = run_demo(tmp_path / "whole", "tiny", package=installed)
    hits = run_killed(tmp_path / "killed", "tiny", KILLS, whole_s, random.Random(4))
    assert hits >= 1, "the kills came too late to mean anything"
    for name in ("pretrain", "finetune"):
        assert_same_run(tmp_path / "whole" / name, tmp_path / "killed" / name)
    for name in ("text", "chat"):
        for shard in sorted((tmp_path / "whole" / name).rglob("*.arrow")):
            other = tmp_path / "killed" / shard.relative_to(tmp_path / "whole")
            assert digest(shard) == digest(other)
    one, other = (tmp_path / n / "transcript.txt" for n in ("whole", "killed"))
    assert one.read_text() == other.read_text()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
