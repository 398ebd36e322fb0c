"""What every verb is made of: the Verb type and the words that options are written in."""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundling.config.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda", "mps")
Settings = Mapping[str, str]
Options = argparse.Namespace


@dataclass(frozen=True)
class Verb:
    """One thing the command line can do."""

    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Options, Settings], None]
    takes_settings: bool = False
    ends_at_once: bool = False
    """Nothing is left to do when it has run: python need not tidy up, which after torch takes a
    tenth of a second."""


def count(text: str) -> int:
    """A whole number as people write it."""
    from foundling.config.resolve import whole_number

    return whole_number(text)


def positive(text: str) -> int:
    """A whole number above zero."""
    value = count(text)
    if value < 1:
        raise ConfigError(f"{text} must be above zero.")
    return value


def positives(text: str) -> tuple[int, ...]:
    """Whole numbers above zero: 1,8,64."""
    found = tuple(positive(word) for word in listed(text))
    if not found:
        raise ConfigError(f"{text!r} names no number; write them as 1,8,64.")
    return found


def free_text(text: str) -> str:
    """Words for a model, of which none may be there; any other option refuses to be empty."""
    return text


def listed(text: str | None) -> list[str]:
    """A list as people write it: a,b,c."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def above_zero(text: str) -> float:
    """A number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{text} is not a number above zero, such as 24 or 0.5.")
    return value


def share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise ConfigError(f"{text} is no share; give a number from 0 up to 1.")
    return value


def run_name(target: str) -> str:
    """What a run of this target is called; llama3.1-8b has a dot and no suffix."""
    name = Path(target).name
    for suffix in (".yaml", ".yml"):
        name = name.removesuffix(suffix)
    return name


def file_options(parser: argparse.ArgumentParser, help: str, *names: str) -> None:
    """-o FILE and --force."""
    names = ("-o", *(names or ("--output",)))
    parser.add_argument(*names, dest="output", type=Path, help=help)
    parser.add_argument("--force", action="store_true", help="-o: overwrite a file that is there")


def check_force(options: Options) -> None:
    """--force alone is a slip."""
    if options.force and options.output is None:
        raise ConfigError("--force has no effect without -o; give -o FILE too.")


def print_json(value: Any) -> None:
    """For scripts."""
    print(json.dumps(value, indent=2))
