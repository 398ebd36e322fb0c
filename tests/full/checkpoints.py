"""Checkpoints at full size: kills at every point of a save, 300 damages, a disk that is full, and
files that mean harm."""

import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "chaos"))

from checkpoint_checks import (
    DAMAGES,
    POINTS,
    check,
    damage_template,
    expect_passed_over,
    half_done,
    saver_program,
)

ROOT = Path(__file__).parents[2]
KILLS = 12
"""Of one process at each point; half as many of one rank of two."""
RANDOM_KILLS = 40
DAMAGES_EACH = 50


def checkpoint_kills() -> dict[str, Any]:
    """kill -9 at each point of a save and at random instants: nothing that was saved is lost."""
    chance = random.Random(2)
    killed: Counter[str] = Counter()
    left: dict[str, Counter[str]] = {point: Counter() for point in POINTS}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run" / "checkpoints"
        folder.mkdir(parents=True)
        with saver_program(folder) as kill:
            kill("point delete 1")
            step = check(folder, at_least=3)
            for point in POINTS:
                # A save has eight tensors, some twenty writes, five fsyncs and one rename: the
                # numbers reach into the second or third save.
                orders = ["point"] * KILLS + ["ranks"] * (KILLS // 2)
                for order in orders:
                    kill(f"{order} {point} {chance.randrange(1, 4 if point == 'rename' else 40)}")
                    step = check(folder, at_least=step)
                    killed[f"{point}, {'two ranks' if order == 'ranks' else 'one process'}"] += 1
                    left[point].update(half_done(folder))
            for _ in range(RANDOM_KILLS):
                kill(f"behind {chance.uniform(0.01, 0.4):.3f}")
                step = check(folder, at_least=step)
                killed["random instant"] += 1
    assert all(left[point]["tmp"] for point in ("write", "fsync", "rename")), left
    assert left["delete"]["old"], left
    return {"kills": dict(killed), "lost": 0, "last_step": step, "half_done_found": left}


def checkpoint_damage() -> dict[str, Any]:
    """300 damaged checkpoints: every one is noticed, none is loaded, the one before is used."""
    noticed: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        template = damage_template(Path(scratch) / "template")
        for kind in DAMAGES:
            chance = random.Random(f"full {kind}")
            for _ in range(DAMAGES_EACH):
                expect_passed_over(kind, template, Path(scratch) / "folder", chance)
                noticed[kind] += 1
    assert sum(noticed.values()) == 300
    return {"damaged": sum(noticed.values()), "noticed": dict(noticed), "loaded": 0}


def hostile() -> dict[str, Any]:
    """Pickles, paths, links, templates, tags and bombs in files: none runs, none escapes."""
    folder = ROOT / "tests" / "unit" / "checkpoint"
    files = [str(folder / f"test_{name}.py") for name in ("reader_hostile", "hostile_files")]
    command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", "-rp", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    names = re.findall(r"^PASSED \S+?::test_(\w+)", done.stdout, re.MULTILINE)
    assert len(names) >= 10, done.stdout[-2000:]
    return {"attacks": len(names), "succeeded": 0, "kinds": dict(Counter(names))}


FULL_DISK = """
import sys, torch
from pathlib import Path
from foundling.checkpoint.manager import CheckpointManager
from foundling.checkpoint.retention import latest
from foundling.config.run import CheckpointConfig
from foundling.runtime import files
from foundling.runtime.dist import World

def no_room(point):
    if point == "write" and step % 4 == 0:
        raise OSError(28, "No space left on device")

if sys.argv[2] == "a writer that raises ENOSPC":
    files.failpoint = no_room

home = Path(sys.argv[1]) / "run" / "checkpoints"
small = {"model.a": torch.arange(100_000.0)}
large = {"model.a": torch.arange(3_000_000.0)}
told = 0
with CheckpointManager(home, CheckpointConfig(keep=2), World()) as saver:
    for step in range(1, 21):
        saver.save(step, large if step % 4 == 0 else small, {"step": step})
        small["model.a"] += 1  # training goes on
        saver._wait()
        told += sum("No space left" in result.error for result in saver.poll())
        assert not [p for p in home.iterdir() if "tmp" in p.name], "a half written folder is left"
    newest = latest(home)
    assert newest is not None and newest.name == "step-00000019", newest
print(told)
"""


def checkpoint_full_disk() -> dict[str, Any]:
    """A disk that is too small for every fourth save: told, tidied up, and gone on."""
    with _small_disk() as (disk, kind):
        done = subprocess.run(
            [sys.executable, "-c", FULL_DISK, str(disk), kind], capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr[-2000:]
    told = int(done.stdout.split()[-1])
    assert told == 5, f"{told} of 5 full disks were told"
    return {"disk": kind, "saves": 20, "did_not_fit": 5, "told": told}


@contextmanager
def _small_disk() -> Iterator[tuple[Path, str]]:
    """A tmpfs of 6 MB, or an ordinary folder and a faked error where mounting is not allowed."""
    place = Path(tempfile.mkdtemp())
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(place)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield place, "a tmpfs of 6 MB" if mounted else "a writer that raises ENOSPC"
    finally:
        if mounted:
            subprocess.run(["umount", str(place)], check=True)
        shutil.rmtree(place)
