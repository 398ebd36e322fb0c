"""Verbs and their options as data, and what every verb does with options."""

import argparse
import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundling.config.errors import ConfigError

if TYPE_CHECKING:
    from foundling.config.run import RunConfig

Settings = Mapping[str, str]
HINT_AFTER_S = 1.0
"""Seconds before a command prints how long it takes."""


class Options(argparse.Namespace):
    """What was typed after a verb, and the defaults of what was not."""

    settings: Settings
    """Every --section.field."""
    given: frozenset[str]
    """Names of the options and arguments that were typed."""

    def fields_of(self, kind: type) -> dict[str, Any]:
        """The options that a dataclass has fields of the same name for."""
        return {f.name: getattr(self, f.name) for f in fields(kind) if hasattr(self, f.name)}


@dataclass(frozen=True)
class Option:
    """An option of a verb (--seed), or an argument (run)."""

    name: str
    """As it is typed; a second spelling comes after a space."""
    help: str
    type: Callable[[str], Any] | tuple[str, ...] = str
    """What reads its text; bool for a flag, and words for one of them."""
    default: Any = None
    """Text is read by `type`, as if it was typed."""
    nargs: str | None = None
    """argparse's; "append" for an option that may be repeated, "?" for one whose text may be left
    out: the first of its words."""
    metavar: str = ""
    """What its text is called in the help, where neither type nor name say it."""
    required: bool = False
    dest: str = ""
    """Its name in Options, where the name itself will not do."""
    requires: str = ""
    """Key of the option or argument without which this one has no effect."""
    only_with: tuple[str, ...] | None = None
    """If this option is given, only these others may be (their keys); None: any."""

    @property
    def key(self) -> str:
        """Its name in Options."""
        return self.dest or self.name.split()[-1].lstrip("-").replace("-", "_")

    @property
    def label(self) -> str:
        """Its name in sentences."""
        return self.name.split()[-1] if self.name.startswith("-") else self.name.upper()

    @property
    def is_argument(self) -> bool:
        """Whether it is typed without a name."""
        return not self.name.startswith("-")

    @property
    def is_mandatory(self) -> bool:
        """Whether it cannot be left out."""
        return self.required or (self.is_argument and self.nargs in (None, "+"))

    @property
    def default_value(self) -> Any:
        """Its value where it was not typed."""
        if self.default is None:
            return False if self.type is bool else [] if self.nargs in ("append", "*") else None
        is_text = isinstance(self.default, str) and not isinstance(self.type, tuple)
        return self.type(self.default) if is_text else self.default  # type: ignore[operator]


@dataclass(frozen=True)
class Verb:
    """One thing that the command line can do."""

    help: str
    options: tuple[Option, ...]
    run: Callable[[Options], None]
    takes_settings: bool = False
    duration_hint: "str | Callable[[Options], str]" = ""
    """How long it takes and what on, where that may be more than two seconds; empty for a quick
    verb, or as a function for quick options."""


@contextlib.contextmanager
def print_duration_hint(name: str, verb: Verb, options: Options, wanted: bool) -> Iterator[None]:
    """After a second of a long command, print how long it takes. By a thread,
    because nothing else runs while torch is imported; a command refused by then prints nothing."""
    from foundling.runtime.console import is_rank_zero

    hint = verb.duration_hint
    hint = hint if isinstance(hint, str) else hint(options)
    if not (wanted and hint and is_rank_zero()):
        yield
        return
    text, how = f"{name}: {hint}", {"file": sys.stderr, "flush": True}
    timer = threading.Timer(HINT_AFTER_S, print, [text], how)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def refuse_given(options: Options, names: Iterable[str], because: str) -> None:
    """Refuse options and settings that have no effect in this use of the verb."""
    for name in names:
        if name in options.given or name in options.settings:
            raise ConfigError(f"--{name.replace('_', '-')} has no effect {because}; leave it out.")


# What reads the text of an option; each complains in words that follow the option's name.


def count(text: str) -> int:
    """A whole number as people write it: 300, 20B, 1e9."""
    from foundling.config.base import whole_number

    return whole_number(text)


def positive(text: str) -> int:
    """A whole number above zero."""
    value = count(text)
    if value < 1:
        raise ConfigError(f"{text} must be above zero.")
    return value


def positive_ints(text: str) -> tuple[int, ...]:
    """Whole numbers above zero: 1,8,64."""
    found = tuple(positive(word) for word in comma_list(text))
    if not found:
        raise ConfigError(f"{text!r} names no number; write them as 1,8,64.")
    return found


def positive_float(text: str) -> float:
    """A number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{text} is not a number above zero, such as 24 or 0.5.")
    return value


def fraction(text: str) -> float:
    """A number from 0 up to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise ConfigError(f"{text} is no share; give a number from 0 up to 1.")
    return value


def comma_list(text: str) -> list[str]:
    """Words with commas between them: a,b,c."""
    return [word.strip() for word in text.split(",") if word.strip()]


def free_text(text: str) -> str:
    """Text for a model, which may be empty; any other option refuses to be empty."""
    return text


# Options that several verbs have.

TARGET = Option("target", "preset, YAML file, or run directory")
MODEL = Option("model", "run, RUN@STEP, or a model from elsewhere")
JSON = Option("--json", "print as JSON", bool)
DEVICE = Option("--device", "where to compute", ("auto", "cpu", "cuda", "mps"), "auto")
WEIGHTS = Option(
    "--weights",
    "precision of the weights; by default bf16 on CUDA, else fp32",
    ("fp32", "bf16", "int8"),
)
TASK_FILES = (
    Option("--bundle", "evaluation bundle of CORE, zip or folder"),
    Option("--task-data", "folder with the files of tasks"),
    Option("--task-file", "Python file with tasks of your own", nargs="append"),
)
FORCE = Option("--force", "overwrite the file of -o", bool, requires="output")


def output_option(
    help: str, *, metavar: str = "FILE", required: bool = False, requires: str = ""
) -> Option:
    """-o PATH."""
    return Option("-o --output", help, Path, metavar=metavar, required=required, requires=requires)


# What several verbs do with their options.


def config_of(
    target: str, settings: Settings, tell: Callable[[str], None] = lambda _: None
) -> "RunConfig":
    """The config of a target and settings; weights that it starts from bring their own shape."""
    from foundling.config.load import load_config

    return load_config(target, settings, tell, model_shape_of)


def model_shape_of(source: str) -> dict[str, Any]:
    """The model's fields of these weights; none while they are not there, which `plan` allows and
    `train` refuses."""
    if not Path(source.partition("@")[0]).expanduser().exists():
        return {}
    from foundling.checkpoint.bundle import model_of

    return model_of(source).model_dump()


def run_name(target: str) -> str:
    """What a run of this target is called; llama3.1-8b has a dot and no suffix."""
    return Path(target).name.removesuffix(".yaml").removesuffix(".yml")


def default_run(target: str) -> Path:
    """The run directory of a target: its own where it is in one, else one named after it."""
    path = Path(target)
    folder = path if path.is_dir() else path.parent
    return folder if (folder / "run.json").is_file() else Path("runs") / run_name(target)


def print_json(value: Any) -> None:
    """For scripts."""
    print(json.dumps(value, indent=2))


def print_lines(lines: Iterable[object]) -> None:
    """Each on a line of its own."""
    for line in lines:
        print(line)


def say_on_stderr(text: str) -> None:
    """Progress, which is no part of the output."""
    from foundling.runtime.console import console

    console(stderr=True).print(text, markup=False)


@contextlib.contextmanager
def bytes_bar(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """Progress through so many bytes: a bar on a terminal, elsewhere a line every ten seconds."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from foundling.runtime.console import console

    lock = threading.Lock()
    began = said = time.monotonic()
    done = 0
    screen = console(stderr=True)
    label = TextColumn("{task.description}", markup=False)
    columns = (label, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, disable=not screen.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=total)

        def advance(size: int) -> None:
            nonlocal done, said
            with lock:
                done += size
                bar.update(task, completed=done)
                now = time.monotonic()
                if not screen.is_terminal and now - said > 10 and total:
                    said = now
                    left = (now - began) * (total - done) / max(done, 1)
                    of = f"{done / 1e9:,.2f} of {total / 1e9:,.2f} GB"
                    say_on_stderr(f"{what}: {of}, {left:,.0f} s left")

        yield advance
