"""Figures that were recorded, and whether today's still reach them.

One JSON file holds a line for each (target, settings, batch, device): a figure of another GPU or of
other settings says nothing about this one.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foundling.config.errors import DataError
from foundling.runtime.files import write_text_atomic

SCHEMA = 1
SHARE = 0.97
"""Of a recorded figure: below it, something has become slower."""


def figure_key(target: str, settings: Mapping[str, str], batch: str, device: str) -> str:
    """What a figure is filed under."""
    named = sorted((name.replace("-", "_"), value) for name, value in settings.items())
    words = [target, *(f"{name}={value}" for name, value in named)]
    return " ".join([*words, f"batch={batch or 'preset'}", f"on {device}"])


def read_figures(path: Path) -> dict[str, dict[str, Any]]:
    """All figures of a file; none where there is no file."""
    if not path.exists():
        return {}
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        figures: dict[str, dict[str, Any]] = tree["figures"]
        if tree["schema"] != SCHEMA or not isinstance(figures, dict):
            raise ValueError
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} holds no figures of schema {SCHEMA}; write it with --record."
        ) from error
    return figures


def record(path: Path, key: str, figure: Mapping[str, Any]) -> None:
    """Put a figure into the file, in the place of an older one."""
    figures = {**read_figures(path), key: dict(figure)}
    tree = {"schema": SCHEMA, "figures": dict(sorted(figures.items()))}
    write_text_atomic(path, json.dumps(tree, indent=1) + "\n")


def recorded(path: Path, key: str) -> dict[str, Any]:
    """The figure to beat."""
    if not path.exists():
        raise DataError(f"--against {path} does not exist; write it with --record {path}.")
    figures = read_figures(path)
    if key not in figures:
        raise DataError(f"{path} has no figure for `{key}`; write it with --record {path}.")
    return figures[key]


def shortfall(tokens_per_s: float, figure: Mapping[str, Any]) -> str:
    """A sentence if a figure is not reached; empty if it is."""
    wanted = float(figure["tokens_per_s"])
    if tokens_per_s >= SHARE * wanted:
        return ""
    return (
        f"{tokens_per_s:,.0f} tokens/s are {tokens_per_s / wanted:.1%} of the recorded"
        f" {wanted:,.0f}, and {SHARE:.0%} is the least."
    )
