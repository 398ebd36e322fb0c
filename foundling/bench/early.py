"""What is refused before minutes of measuring: names that nobody has, files that nobody can write,
options that would do nothing."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from foundling.config.errors import ConfigError


def refuse_unknown(asked: Iterable[object], known: Iterable[object]) -> None:
    """Words of --only that name nothing."""
    there = [str(name) for name in known]
    for word in map(str, asked):
        if word not in there:
            raise ConfigError(f"--only {word} is unknown here; there are {', '.join(there)}.")


def refuse_unwritable(path: Path, option: str) -> None:
    """A file that could not be written in the end; nothing is made here."""
    home = path.absolute().parent
    while not home.exists():
        home = home.parent
    writable = os.access(path if path.exists() else home, os.W_OK)
    if path.is_dir() or not home.is_dir() or not writable:
        raise ConfigError(f"{option} {path} cannot be written; give another file.")


def refuse_idle(given: Mapping[str, object], because: str) -> None:
    """Options that were given (not None) and have no effect."""
    for option, value in given.items():
        if value is not None:
            raise ConfigError(f"{option} has no effect {because}; leave it out.")
