"""`runs compare A B ...`: what differs in the settings first, then what came of it.

004 compared two optimizers at different learning rates by mistake; so the settings come before any
number, and numbers are compared at steps that all runs have.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from foundling.config.errors import RunError
from foundling.config.resolve import flatten
from foundling.report.read import RunData, number, read_run
from foundling.runtime.rundir import RunDir

ROWS = 10
"""Common steps that are shown, evenly spread, the last one among them."""
COLUMNS = ("loss", "grad_norm", "tokens_per_s", "mfu", "matmul_share")
CLOCKED = ("bpb", "floor_bpb")
FINAL = ("full_bpb", "full_floor_bpb")


def compare_runs(paths: Sequence[Path]) -> dict[str, Any]:
    """Settings that differ, metrics at common steps, scores: of two runs or more."""
    if len(paths) < 2:
        raise RunError("compare needs two runs or more; name them.")
    runs = [read_run(RunDir(path).require()) for path in paths]
    return {
        "runs": [str(run.run.path) for run in runs],
        "settings": _settings(runs),
        "metrics": {name: _common(runs, name) for name in COLUMNS},
        "evals": {name: _common_evals(runs, name) for name in CLOCKED},
        "scores": _scores(runs),
        "tokens": [run.total_tokens for run in runs],
        "steps": [run.steps for run in runs],
    }


def _settings(runs: Sequence[RunData]) -> dict[str, list[str]]:
    """Fields of the config that are not the same in all of them."""
    columns = [dict(flatten(run.config)) if run.config else {} for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    table = {name: [str(column.get(name, "unknown")) for column in columns] for name in names}
    return {name: values for name, values in table.items() if len(set(values)) > 1}


def _common(runs: Sequence[RunData], field: str) -> dict[int, list[float]]:
    return _at_common_steps([_by_step(run.metrics, field) for run in runs])


def _common_evals(runs: Sequence[RunData], field: str) -> dict[int, list[float]]:
    return _at_common_steps([_by_step(run.evals, field) for run in runs])


def _by_step(lines: Sequence[Mapping[str, Any]], field: str) -> dict[int, float]:
    found = {int(line["step"]): number(line, field) for line in lines if "step" in line}
    return {step: value for step, value in found.items() if value is not None}


def _at_common_steps(columns: Sequence[Mapping[int, float]]) -> dict[int, list[float]]:
    common = sorted(set.intersection(*(set(column) for column in columns)))
    count = min(ROWS, len(common))
    picked = sorted({common[round((i + 1) * len(common) / count) - 1] for i in range(count)})
    return {step: [column[step] for column in columns] for step in picked}


def _scores(runs: Sequence[RunData]) -> dict[str, list[float | None]]:
    """What `foundling eval` found, where it was run."""
    table: dict[str, list[float | None]] = {}
    for name in FINAL:
        values = [number(run.final, name) for run in runs]
        if any(value is not None for value in values):
            table[name] = values
    quiz = [run.final.get("quiz") or {} for run in runs]
    if any(quiz):
        table["quiz accuracy"] = [number(part, "accuracy") for part in quiz]
    return table


def describe_comparison(found: Mapping[str, Any]) -> Iterator[str]:
    """The same for a person."""
    for letter, path in zip(_letters(), found["runs"], strict=False):
        yield f"{letter}  {path}"
    yield ""
    if found["settings"]:
        yield "settings that differ"
        width = max(len(name) for name in found["settings"])
        for name, values in found["settings"].items():
            yield f"  {name:<{width}}  " + "  |  ".join(values)
    else:
        yield "the settings are the same"
    for title, table in _tables(found):
        yield ""
        yield from _table(title, table, len(found["runs"]))
    if found["scores"]:
        yield ""
        yield "final scores"
        for name, values in found["scores"].items():
            yield f"  {name:<16}" + "".join(f"{_cell(value):>14}" for value in values)


def _tables(found: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[int, list[float]]]]:
    for name in ("loss", "grad_norm", "tokens_per_s"):
        yield name, found["metrics"][name]
    for name, table in found["evals"].items():
        if table:
            yield f"held-out {name}", table


def _table(title: str, table: Mapping[int, list[float]], runs: int) -> Iterator[str]:
    if not table:
        yield f"{title}: no step is common to all of them"
        return
    letters = "".join(f"{letter:>14}" for letter, _ in zip(_letters(), range(runs), strict=False))
    differs = "".join(
        f"{letter + ' - A':>14}" for letter, _ in zip(_letters()[1:], range(runs - 1), strict=False)
    )
    yield f"{title}\n  {'step':>8}{letters}{differs}"
    for step, values in table.items():
        own = "".join(f"{_cell(value):>14}" for value in values)
        gaps = "".join(f"{value - values[0]:>+14.4g}" for value in values[1:])
        yield f"  {step:>8}{own}{gaps}"


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.5g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _letters() -> str:
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
