"""`runs tree`: which run came from which, and what was changed on the way.

A run names its parent by the path it had then; runs that were moved together are found beside each
other (runtime/rundir.py). A parent that is gone is still named, so that no child looks like a root.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from foundling.config.errors import UserError
from foundling.report.listing import list_runs
from foundling.runtime.rundir import RunDir

MOST_CHANGES = 4
_SAYS_NOTHING = ("train.branch", "train.init", "train.device", "train.threads")


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
    kind = stated.get("kind", "init")
    return {"parent": where, "parent_step": stated.get("step"), "kind": kind, "changes": changes}


def _changes(parent: RunDir, run: RunDir) -> list[str]:
    from foundling.config.resolve import differences, load_run_config

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
            yield from _draw(root, children, "", True)
        else:
            yield _line(root)
            yield from _below(root, children, "")


def _below(
    run: Mapping[str, Any], children: Mapping[Path | None, list[Mapping[str, Any]]], indent: str
) -> Iterator[str]:
    own = children.get(Path(run["path"]).resolve(), [])
    own = sorted(own, key=lambda child: (child["parent_step"] or 0, child["path"]))
    for child in own:
        yield from _draw(child, children, indent, child is own[-1])


def _draw(
    run: Mapping[str, Any],
    children: Mapping[Path | None, list[Mapping[str, Any]]],
    indent: str,
    is_last: bool,
) -> Iterator[str]:
    yield f"{indent}{'└─ ' if is_last else '├─ '}{_line(run)}"
    yield from _below(run, children, indent + ("   " if is_last else "│  "))


def _line(run: Mapping[str, Any]) -> str:
    text = f"{run['path']}  {run['stage']}, {run['status']} at step {run['step']:,}"
    if run["parent"]:
        how = "branched off" if run["kind"] == "branch" else "began with the weights of"
        text += f"; {how} step {run['parent_step']}"
    shown = run["changes"][:MOST_CHANGES]
    more = len(run["changes"]) - len(shown)
    told = ", ".join(shown) + (f" and {more} more" if more > 0 else "")
    return text + (f" with {told}" if told else "")
