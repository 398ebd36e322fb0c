"""What every verb is made of: the Verb type and the words that options are written in."""

import argparse
import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundling.config.errors import ConfigError

if TYPE_CHECKING:
    from foundling.config.run import RunConfig

DEVICES = ("auto", "cpu", "cuda", "mps")
Settings = Mapping[str, str]
Options = argparse.Namespace
HINT_AFTER_S = 1.0
"""What runs long says so within two seconds."""


@dataclass(frozen=True)
class Verb:
    """One thing the command line can do."""

    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Options, Settings], None]
    takes_settings: bool = False
    duration_hint: "str | Callable[[Options], str]" = ""
    """How long it takes and what on, where that may be more than two seconds; empty for a quick
    verb, or as a function for quick options."""


@contextlib.contextmanager
def print_duration_hint(name: str, verb: Verb, options: Options) -> Iterator[None]:
    """After a second of a long command, print what it does and how long it takes. By a thread,
    because nothing else runs while torch is imported; a command refused by then prints nothing."""
    from foundling.runtime.console import is_rank_zero

    hint = verb.duration_hint
    hint = hint if isinstance(hint, str) else hint(options)
    if not hint or not is_rank_zero():
        yield
        return
    text, how = f"{name}: {verb.help}; {hint}", {"file": sys.stderr, "flush": True}
    timer = threading.Timer(HINT_AFTER_S, print, [text], how)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def resolved(
    target: str, settings: Settings, tell: Callable[[str], None] = lambda _: None
) -> "RunConfig":
    """The config of a target and settings; weights that it starts from bring their own shape."""
    from foundling.config.load import load_config

    return load_config(target, settings, tell, shape_of)


def shape_of(source: str) -> dict[str, Any]:
    """The model's fields of these weights; none while they are not there, which `plan` allows and
    `train` refuses."""
    if not Path(source.partition("@")[0]).expanduser().exists():
        return {}
    from foundling.checkpoint.bundle import model_of

    return model_of(source).model_dump()


def count(text: str) -> int:
    """A whole number as people write it."""
    from foundling.config.base import whole_number

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
    """Text for a model, which may be empty; any other option refuses to be empty."""
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
    """Refuse --force without -o."""
    if options.force and options.output is None:
        raise ConfigError("--force has no effect without -o; give -o FILE too.")


def refuse_given(options: argparse.Namespace, names: Iterable[str], because: str) -> None:
    """Refuse options that have no effect in this use of the verb."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value is not False and value not in ([], ""):
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} has no effect {because}; leave it out.")


def print_json(value: Any) -> None:
    """For scripts."""
    print(json.dumps(value, indent=2))
