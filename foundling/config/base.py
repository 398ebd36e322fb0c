"""What all sections share: numbers such as 20B, and the words of a refusal."""

import math
import re
from dataclasses import fields
from typing import Any

from foundling.config.errors import ConfigError, IdleError


def _is_set(section: object, name: str) -> bool:
    default = next(field.default for field in fields(section) if field.name == name)  # type: ignore[arg-type]
    return bool(getattr(section, name) != default)


def _no_effect(name: str, when: str, remedy: str) -> None:
    raise IdleError(name, when, f"remove it or use {remedy}")


def _require(condition: bool, sentence: str, value: object) -> None:
    if not condition:
        raise ConfigError(f"{sentence} (it is {value}).")


_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def _number(text: str, kind: Any) -> Any:
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d+)?)([KMBTkmbt]?)", text)
    if kind not in (int, float) or not match or text.isdigit():
        return text
    value = float(match[1]) * _SUFFIXES.get(match[2].upper(), 1)
    if math.isinf(value):
        return text
    return int(value) if kind is int and value == int(value) else value if kind is float else text


def whole_number(text: str) -> int:
    """A whole number as people write it: 300, 20B, 3.5M, 1e9."""
    value = _number(text, int)
    if re.fullmatch(r"-\d+", text):
        raise ConfigError(f"{text} is below zero; give a whole number such as 300, 20B or 1e9.")
    if not str(value).isdigit():
        raise ConfigError(f"{text} is not a whole number such as 300, 20B or 1e9.")
    return int(value)
