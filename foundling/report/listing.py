"""`runs list` and `runs show`: what runs there are, and what one of them has eaten and scored."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from foundling.config.errors import UserError
from foundling.config.manifest import Manifest
from foundling.plan import compare
from foundling.plan.diet import added_up, asked_for, by_documents, diet_table
from foundling.report.eaten import Diet, diets
from foundling.report.read import RunData, is_number, read_run
from foundling.runtime.lock import is_locked
from foundling.runtime.rundir import RunDir


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """Every run below `folder`, in order of its path."""
    found = sorted(p.parent for p in folder.rglob("run.json") if ".trash" not in p.parts)
    return [_listed(path) for path in found]


def _listed(path: Path) -> dict[str, Any]:
    """One run's line; a run that cannot be read is listed as such and hides no other."""
    try:
        return _summary(read_run(RunDir(path)))
    except Exception:  # whatever is wrong with this one
        unknown = {"stage": "unknown", "parent": None, "status": "damaged"}
        return {"path": str(path), **unknown, "step": 0, "tokens": 0}


def show_run(run: RunDir) -> dict[str, Any]:
    """One run: how far it has come, what it has eaten, what it scored."""
    data = read_run(run)
    last = dict(data.metrics[-1]) if data.metrics else {}
    parts = diets(run)
    return {
        **_summary(data),
        "eaten": {name: counts["tokens"] for name, counts in parts[-1].sources.items()},
        "diet": [part.to_json() for part in parts],
        "diet_total": added_up([part.sources for part in parts]),
        "asked": [*_in_documents(data, parts[-1]), *asked_for(data.config.data)]
        if data.config
        else [],
        "last": last,
        "plan": data.info.get("plan", {}),
        "scores": dict(data.final),
        "events": [dict(event) for event in data.events],
        "damage": list(data.damage),
    }


def _in_documents(data: RunData, part: Diet) -> list[str]:
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
    yield from (f"  {told}, left out here" for told in shown["damage"])
    if shown["parent"]:
        yield f"  from {shown['parent']}"
    yield "  what the model has eaten:"
    eaten = [(part["stage"], part["sources"]) for part in shown["diet"]]
    yield from (f"    {line}" for line in diet_table(eaten))
    yield from (f"    {line}" for line in shown["asked"])
    yield from (f"    {part['missing']}" for part in shown["diet"] if part["missing"])
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


def _summary(data: RunData) -> dict[str, Any]:
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
