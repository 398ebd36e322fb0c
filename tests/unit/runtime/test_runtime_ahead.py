"""Hashes computed ahead: right, believed once, and never of a file that is another one now."""

import hashlib
import os
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
