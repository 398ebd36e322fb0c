"""Exceptions for mistakes of the user, and the exit code of each.

    UserError (exit code 2)      one sentence that names the thing, the value and the remedy
      ConfigError                a key, a type or a combination of settings
        UnusedSettingError       a setting that has no effect with another one
      DataError                  a source, shard, manifest or tokenizer that cannot be used
      CheckpointError            a checkpoint that is missing, torn or does not fit
      RunError                   a run directory that is locked, finished or of another kind
        MissingOrDamagedError    what a run needs is gone or damaged
        NotScoredError           models without scores of the same task

Everything else that escapes is a bug of ours and keeps its traceback. `sentence_of` is the
sentence of what pydantic finds wrong with a section.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any


class UserError(Exception):
    """A mistake the user can repair; the command line prints one sentence and exits with 2."""

    exit_code = 2


class ConfigError(UserError):
    """A setting that is unknown, of the wrong type, or without effect."""


class UnusedSettingError(ConfigError):
    """A setting that has no effect with the value of another one."""

    def __init__(self, setting: str, when: str, remedy: str) -> None:
        super().__init__(f"{setting} has no effect {when}; {remedy}.")
        self.setting = setting


class DataError(UserError):
    """Text, shards, a manifest or a tokenizer that cannot be used as they are."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or of another shape."""


class RunError(UserError):
    """A run directory that is in use, finished, or not a run at all."""


class NotScoredError(RunError):
    """Two models have no scores of the same task."""


class MissingOrDamagedError(RunError):
    """Data or checkpoints that a run needs are gone or damaged; exit code 65."""

    exit_code = 65


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known name that is nearest to an unknown one, or all of them, as a clause."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}."


_KINDS = {
    "int": "a whole number such as 300, 3.5M or 20B",
    "float": "a number such as 0.1 or 1e9",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "dict": "a mapping",
    "finite": "finite",
    "model": "a mapping",
}
"""What a value should have been, by the first word of pydantic's name of the mistake."""


def sentence_of(error: Mapping[str, Any], where: str, known: Iterable[str]) -> str:
    """One mistake that pydantic found in the section `where`, which has the fields `known`: the
    setting, its value, and what would do."""
    name = where
    for part in error["loc"]:
        name += f"[{part}]" if isinstance(part, int) else f".{part}"
    name, kind, value = name.lstrip("."), error["type"], error["input"]
    limits = error.get("ctx", {})
    if kind == "extra_forbidden":
        hint = did_you_mean(str(error["loc"][-1]), known)
        section = name.rpartition(".")[0]
        return (
            f"unknown setting {name}; {hint.replace('did you mean ', f'did you mean {section}.')}"
        )
    if kind == "too_long" or (kind == "missing" and name.endswith("]")):
        shown = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
        return f"{name.partition('[')[0]} must be 2 numbers such as 0.9,0.95, not {shown!r}."
    if kind == "missing":
        return f"{where} needs {error['loc'][-1]}; there are {', '.join(known)}."
    if kind in _RANGES:
        limit = next(iter(limits.values()))
        text = _BY_ZERO.get(kind) if limit == 0 else None
        return f"{name} {text or _RANGES[kind].format(_shown(limit))} (it is {_shown(value)})."
    wanted = _KINDS.get(kind.partition("_")[0]) or str(error["msg"])
    if kind == "literal_error":
        wanted = "one of " + ", ".join(re.findall("'([^']*)'", limits["expected"]))
    shown = " ".join(str(value).split())[:60]
    if not shown:
        return f"{name} is empty; give {wanted}."
    return f"{name} must be {wanted}, not {shown!r}."


_RANGES = {
    "greater_than": "must be above {}",
    "greater_than_equal": "is at least {}",
    "less_than": "must be below {}",
    "less_than_equal": "is at most {}",
}
_BY_ZERO = {"greater_than": "must be positive", "greater_than_equal": "cannot be negative"}


def _shown(number: float | str) -> str:
    number = float(number) if isinstance(number, str) and not number.isdigit() else number
    return f"{number:g}" if isinstance(number, float) else f"{int(number):,}"
