"""Hashes computed ahead: right, believed once, and never of a file that is another one now."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from foundling.runtime import ahead


def made(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def begun(file: Path) -> None:
    """Begin, and wait until it cannot be taken back any more."""
    ahead.hash_ahead([file])
    ahead._jobs[str(file.resolve())][1].result()


def test_a_hash_is_that_of_the_file_and_given_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "WINDOW", 1 << 16)
    content = os.urandom(3 * (1 << 16) + 5)
    file = made(tmp_path / "a", content)
    begun(file)
    assert ahead.hash_of(file) == hashlib.sha256(content).hexdigest()
    assert ahead.hash_of(file) is None
    empty = made(tmp_path / "empty", b"")
    begun(empty)
    assert ahead.hash_of(empty) == hashlib.sha256(b"").hexdigest()


def test_a_file_that_was_written_since_has_none(tmp_path: Path) -> None:
    file = made(tmp_path / "a", b"one")
    begun(file)
    os.utime(file, ns=(1, 1))
    assert ahead.hash_of(file) is None
    ahead.hash_ahead([tmp_path / "nowhere"])
    assert ahead.hash_of(tmp_path / "nowhere") is None


def test_the_newest_step_is_meant_by_number(tmp_path: Path) -> None:
    steps = tmp_path / "run" / "checkpoints"
    for name in ("step-9", "step-10", "step-11.tmp-3"):
        made(steps / name / "manifest.json", b"{}")
        made(steps / name / "a.distcp", b"a")
    run = str(tmp_path / "run")

    def names(source: str) -> list[str]:
        return [str(file.relative_to(steps)) for file in ahead.newest_checkpoint(source)]

    assert names(run) == ["step-10/a.distcp", "step-10/manifest.json"]
    assert names(f"{run}@9") == names(str(steps / "step-9"))
    assert names(f"{run}@9") == ["step-9/a.distcp", "step-9/manifest.json"]
    assert names(f"{run}@8") == names(str(tmp_path / "elsewhere")) == []


def test_a_file_that_was_changed_in_place_and_dated_back_has_none(tmp_path: Path) -> None:
    file = made(tmp_path / "a", b"one")
    written = file.stat()
    begun(file)
    with open(file, "r+b") as stream:
        stream.write(b"two")
    os.utime(file, ns=(written.st_atime_ns, written.st_mtime_ns))
    assert file.stat().st_mtime_ns == written.st_mtime_ns
    assert ahead.hash_of(file) is None


def test_nobody_waits_for_a_hash_that_is_not_asked_for(tmp_path: Path) -> None:
    """A pipe without a writer takes for ever, as tens of gigabytes seem to."""
    os.mkfifo(tmp_path / "pipe")
    code = f"""from pathlib import Path
from foundling.runtime import ahead
ahead.hash_ahead([Path({str(tmp_path / "pipe")!r})])"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_file_that_is_cut_off_meanwhile_ends_no_process(tmp_path: Path) -> None:
    with open(tmp_path / "a", "wb") as stream:
        stream.truncate(1 << 30)
    code = f"""import os, time
from pathlib import Path
from foundling.runtime import ahead
file = Path({str(tmp_path / "a")!r})
ahead.hash_ahead([file])
time.sleep(0.1)
os.truncate(file, 10)
assert ahead.hash_of(file) is None"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_is_no_name_of_a_file_means_none(tmp_path: Path) -> None:
    assert ahead.newest_checkpoint("x" * 5000) == []
    assert ahead.newest_checkpoint("a\0b") == []
