"""`runs list`, `runs show` and `compare`: run directories as tables."""

import contextlib
import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from foundling.config.data_manifest import Manifest
from foundling.config.errors import RunError, UserError
from foundling.config.load import differences, flatten, load_run_config
from foundling.plan.forecast import compare
from foundling.plan.supply import added_up, asked_for, by_documents, tokens_table
from foundling.report.lineage import TokensOfLife, tokens_of_life
from foundling.runtime.files import refuse_existing
from foundling.runtime.lock import is_locked
from foundling.runtime.run_dir import RunDir
from foundling.runtime.run_reader import (
    Points,
    RunData,
    RunSummary,
    is_number,
    number,
    numbers_of,
    points_of,
    read_run,
    read_summary,
    step_lines,
)

# `runs list --tree`: which run came from which, and what was changed on the way.
#
# A run names its parent by the path it had then; runs that were moved together are found in
# one folder (runtime/run_dir.py). A parent that is gone is still named, so that no child looks like
# a root.

MOST_CHANGES = 4
_SAYS_NOTHING = ("train.start", "train.start_with", "train.device", "train.threads")


def lineage(folder: Path) -> list[dict[str, Any]]:
    """Every run below `folder` with its parent, the step it left at, and the settings changed."""
    return [{**run, **_origin(RunDir(run["path"]))} for run in list_runs(folder)]


def _origin(run: RunDir) -> dict[str, Any]:
    nothing: dict[str, Any] = {"parent": None, "parent_step": None, "kind": None, "changes": []}
    try:
        stated = run.read_info().get("parent")
        parent = run.parent()
    except UserError:
        return nothing
    if not isinstance(stated, Mapping):
        return nothing
    changes = _changes(parent, run) if parent else []
    where = str(parent.path) if parent else str(stated.get("path"))
    kind = stated.get("kind", "weights")
    return {"parent": where, "parent_step": stated.get("step"), "kind": kind, "changes": changes}


def _changes(parent: RunDir, run: RunDir) -> list[str]:
    try:
        found = differences(load_run_config(parent.config_path), load_run_config(run.config_path))
    except UserError:
        return []
    return [f"{c.field} {c.old} -> {c.new}" for c in found if c.field not in _SAYS_NOTHING]


def draw_tree(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The forest as lines, children below their parents in the order of the step they left at."""
    known = {Path(run["path"]).resolve(): run for run in runs}
    children: dict[Path | None, list[Mapping[str, Any]]] = {}
    for run in runs:
        above = Path(run["parent"]).resolve() if run["parent"] else None
        children.setdefault(above if above in known else None, []).append(run)
    for root in children.get(None, []):
        if root["parent"]:
            yield f"({root['parent']}, not here)"
        yield ("└─ " if root["parent"] else "") + _line(root)
        yield from _below(root, children, "   " if root["parent"] else "")


def _below(
    run: Mapping[str, Any],
    children: Mapping[Path | None, list[Mapping[str, Any]]],
    indent: str,
) -> Iterator[str]:
    own = children.get(Path(run["path"]).resolve(), [])
    own = sorted(own, key=lambda child: (child["parent_step"] or 0, child["path"]))
    for child in own:
        is_last = child is own[-1]
        yield f"{indent}{'└─ ' if is_last else '├─ '}{_line(child)}"
        yield from _below(child, children, indent + ("   " if is_last else "│  "))


def _line(run: Mapping[str, Any]) -> str:
    text = f"{run['path']}  {run['stage']}, {run['status']} at step {run['step']:,}"
    if run["parent"]:
        how = "branched off" if run["kind"] == "branch" else "began with the weights of"
        text += f"; {how} step {run['parent_step']}"
    shown = run["changes"][:MOST_CHANGES]
    more = len(run["changes"]) - len(shown)
    changes = ", ".join(shown) + (f" and {more} more" if more > 0 else "")
    return text + (f" with {changes}" if changes else "")


# `runs list` and `runs show`: what runs there are, and what one of them was trained on and scored.


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """Every run below `folder`, in order of its path."""
    found = sorted(p.parent for p in folder.rglob("run.json") if ".trash" not in p.parts)
    return [_listed(path) for path in found]


def _listed(path: Path) -> dict[str, Any]:
    """One run's line; a run that cannot be read is listed as such and hides no other."""
    try:
        return _summary(read_summary(RunDir(path)))
    except Exception:  # whatever is wrong with this one
        unknown = {"stage": "unknown", "parent": None, "status": "damaged"}
        return {"path": str(path), **unknown, "step": 0, "tokens": 0}


def show_run(run: RunDir) -> dict[str, Any]:
    """One run: how far it has come, what it was trained on, what it scored."""
    data = read_run(run)
    parts = tokens_of_life(run)
    return {
        **_summary(data),
        "tokens_by_source": {name: counts["tokens"] for name, counts in parts[-1].sources.items()},
        "tokens_read": [part.to_json() for part in parts],
        "tokens_total": added_up([part.sources for part in parts]),
        "asked": [*_in_documents(data, parts[-1]), *asked_for(data.config.data)]
        if data.config
        else [],
        "last": dict(data.last),
        "plan": data.info.get("plan", {}),
        "scores": dict(data.final),
        "events": [dict(event) for event in data.events],
        "damage": list(data.damage),
    }


def _in_documents(data: RunData, part: TokensOfLife) -> list[str]:
    """Shares of documents, where the mixture is weighed by them and the data is still there."""
    if data.config is None or data.config.data.weights_by != "documents":
        return []
    documents = {}
    for name in part.sources:
        with contextlib.suppress(UserError, OSError):
            documents[name] = sum(shard.documents for shard in Manifest.load(Path(name)).train)
    return by_documents({name: c["epochs"] for name, c in part.sources.items()}, documents)


def describe_run(shown: dict[str, Any]) -> Iterator[str]:
    """The same for a person."""
    yield f"{shown['path']}: {shown['stage']}, {shown['status']} at step {shown['step']:,}"
    yield from (f"  {damage}, left out here" for damage in shown["damage"])
    if shown["parent"]:
        yield f"  from {shown['parent']}"
    yield "  tokens the model was trained on:"
    read = [(part["stage"], part["sources"]) for part in shown["tokens_read"]]
    yield from (f"    {line}" for line in tokens_table(read))
    yield from (f"    {line}" for line in shown["asked"])
    yield from (f"    {part['missing']}" for part in shown["tokens_read"] if part["missing"])
    yield from (f"    {line}" for line in _data_changes(shown["events"]))
    if is_number(shown["last"].get("loss")) and is_number(shown["last"].get("tokens_per_s")):
        yield f"  loss {shown['last']['loss']:.4f}, {shown['last']['tokens_per_s']:,.0f} tokens/s"
    yield from (f"  {line}" for line in compare(shown["plan"]))
    for name in ("full_bpb", "full_floor_bpb"):
        if shown["scores"].get(name) is not None:
            yield f"  {name} {shown['scores'][name]:.4f}"
    if shown["scores"].get("quiz"):
        quiz = shown["scores"]["quiz"]
        yield f"  quiz {quiz['accuracy']:.1%} of {quiz['n']} (± {quiz['stderr']:.1%})"


def _data_changes(events: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Where the run was given other data, and what was left unread by it."""
    for event in events:
        if event.get("event") != "data_changed":
            continue
        yield f"from step {event['step']:,} on: changed {', '.join(event['changes'])}"
        for left in event["left_unread"]:
            yield (
                f"  {left['units']:,} of {left['of']:,} units of {left['source']}'s epoch"
                f" {left['epoch']} were left unread"
            )


def _summary(data: RunSummary) -> dict[str, Any]:
    status = data.status
    if status == "running" and not is_locked(data.run.path):
        status = "stopped"  # killed or interrupted: the same command continues it
    return {
        "path": str(data.run.path),
        "stage": data.stage,
        "parent": data.parent or None,
        "status": status,
        "step": data.steps,
        "tokens": data.total_tokens,
    }


# `compare A B ...` of runs: what differs in the settings first, then what came of it.
#
# Two optimizers compared at different learning rates by mistake say nothing: settings come before
# any number, and numbers are compared at steps that all runs have.

ROWS = 10
"""Common steps that are shown, evenly spread, the last one among them."""
COLUMNS = ("loss", "grad_norm", "tokens_per_s", "mfu", "matmul_share")
CLOCKED = ("bpb", "floor_bpb")
FINAL = ("full_bpb", "full_floor_bpb")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def compare_runs(paths: Sequence[Path]) -> dict[str, Any]:
    """Settings that differ, metrics at common steps, scores: of two runs or more."""
    if len(paths) < 2:
        raise RunError("compare needs two runs or more; name them.")
    runs = [read_run(RunDir(path).require()) for path in paths]
    return {
        "runs": [str(run.run.path) for run in runs],
        "settings": _settings(runs),
        "metrics": {
            name: _at_common_steps([run.points("step", name) for run in runs]) for name in COLUMNS
        },
        "evals": {
            name: _at_common_steps([points_of(run.evals, "step", name) for run in runs])
            for name in CLOCKED
        },
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


def _at_common_steps(columns: Sequence[Points]) -> dict[int, list[float]]:
    """Columns against steps where all of them have a value; the last one of a step counts."""
    common = reduce(np.intersect1d, [column[:, 0] for column in columns])
    count = min(ROWS, len(common))
    picked = sorted({common[round((i + 1) * len(common) / count) - 1] for i in range(count)})
    return {
        int(step): [float(column[column[:, 0] == step][-1, 1]) for column in columns]
        for step in picked
    }


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
    for letter, path in zip(LETTERS, found["runs"], strict=False):
        yield f"{letter}  {path}"
    yield ""
    if found["settings"]:
        yield "settings that differ"
        width = max(len(name) for name in found["settings"])
        for name, values in found["settings"].items():
            yield f"  {name:<{width}}  " + "  |  ".join(values)
    else:
        yield "the settings are the same"
    tables = {name: found["metrics"][name] for name in ("loss", "grad_norm", "tokens_per_s")}
    tables |= {f"held-out {name}": table for name, table in found["evals"].items() if table}
    for title, table in tables.items():
        yield ""
        yield from _table(title, table, len(found["runs"]))
    if found["scores"]:
        yield ""
        yield "final scores"
        for name, values in found["scores"].items():
            yield f"  {name:<16}" + "".join(f"{_cell(value):>14}" for value in values)


def _table(title: str, table: Mapping[int, list[float]], runs: int) -> Iterator[str]:
    if not table:
        yield f"{title}: no step is common to all of them"
        return
    letters = LETTERS[:runs]
    own = "".join(f"{letter:>14}" for letter in letters)
    gaps = "".join(f"{letter + ' - A':>14}" for letter in letters[1:])
    yield f"{title}\n  {'step':>8}{own}{gaps}"
    for step, values in table.items():
        own = "".join(f"{_cell(value):>14}" for value in values)
        gaps = "".join(f"{value - values[0]:>+14.4g}" for value in values[1:])
        yield f"  {step:>8}{own}{gaps}"


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.5g}" if abs(value) < 1e4 else f"{value:,.0f}"


# `report --csv` and `--parquet`: every number of metrics.jsonl a column, a row a step.
#
# The lines are read twice, for the names of the columns and for their values, so that a run of a
# million steps is never held whole. What is nested has a name with dots: sources.data/mine.tokens.

ROWS_AT_ONCE = 10_000
"""Rows of Parquet that are written together."""


def _step_columns(runs: Sequence[RunDir]) -> list[str]:
    """Names of the columns, in the order in which they are met."""
    names = dict.fromkeys(["run", "step"])
    for row in _step_rows(runs):
        names |= dict.fromkeys(row)
    return list(names)


def _step_rows(runs: Sequence[RunDir]) -> Iterator[dict[str, Any]]:
    """A row a step, without what it has no number for."""
    for run in runs:
        name = run.path.resolve().name
        for line in step_lines(run):
            yield {"run": name, **dict(numbers_of(line))}


def print_csv(runs: Sequence[RunDir], out: IO[str]) -> None:
    """The table as CSV; a step without a number has an empty field."""
    writer = csv.DictWriter(out, _step_columns(runs))
    writer.writeheader()
    writer.writerows(_step_rows(runs))


def write_table(runs: Sequence[RunDir], path: Path, *, parquet: bool, force: bool) -> None:
    """The table as a file, whole or not there; a file that is there is replaced with `force`."""
    if not force:
        refuse_existing(path)
    working = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        if parquet:
            _write_parquet(runs, working)
        else:
            with open(working, "w", encoding="utf-8", newline="") as file:
                print_csv(runs, file)
        os.replace(working, path)
    finally:
        working.unlink(missing_ok=True)


def _write_parquet(runs: Sequence[RunDir], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {"run": pa.string(), "step": pa.int64()}
    schema = pa.schema([(name, types.get(name, pa.float64())) for name in _step_columns(runs)])
    rows = _step_rows(runs)
    with pq.ParquetWriter(path, schema) as writer:
        while batch := list(islice(rows, ROWS_AT_ONCE)):
            columns = [
                [row.get(name) for row in batch]
                if name in types
                else [None if row.get(name) is None else float(row[name]) for row in batch]
                for name in schema.names
            ]
            arrays = [pa.array(c, t) for c, t in zip(columns, schema.types, strict=True)]
            writer.write_batch(pa.record_batch(arrays, schema=schema))
