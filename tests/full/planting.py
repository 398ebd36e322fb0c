"""A fault to plant: one edit of one file, and the tests that must notice."""

import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """An edit that breaks something, and the tests that must say so."""

    name: str
    about: str
    """The promise or the room that it breaks."""
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def plant(fault: Fault, root: Path, copy: Path) -> Path:
    """A copy of the project with one fault in it."""
    for name in ("foundling", "benchmarks", "tests", "docs"):
        shutil.copytree(
            root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis")
        )
    for name in ("pyproject.toml", "README.md", "Makefile"):
        shutil.copy(root / name, copy / name)
    file = copy / fault.file
    text = file.read_text()
    assert text.count(fault.old) == 1, f"{fault.name}: its place in {fault.file} has changed"
    file.write_text(text.replace(fault.old, fault.new))
    return copy
