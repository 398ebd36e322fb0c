"""`foundling compare A B`: every task that both have, and all of them together."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foundling.config.errors import DataError, NotScoredError
from foundling.eval.results import BITS, SCORES_FILE, TOKENS, read_examples, read_scores
from foundling.eval.significance import (
    ALPHA,
    SEEN,
    PairedScores,
    holm,
    interval,
    over_seeds,
    p_value,
    times_as_many,
)
from foundling.runtime.run_dir import RunDir, split_step

# Where a model's scores lie: a run, one of its checkpoints, or any folder of an evaluation.


@dataclass(frozen=True)
class ScoredExample:
    """One line of a task."""

    score: float
    weight: float
    contaminated: bool


@dataclass(frozen=True)
class Evaluated:
    """One evaluation: the tasks' entries, and their examples on demand."""

    folder: Path
    tasks: dict[str, dict[str, Any]]

    def examples(self, task: str) -> dict[str, ScoredExample]:
        """A task's examples by id."""
        path = self.folder / f"{task}.jsonl"
        found: dict[str, ScoredExample] = {}
        for line in read_examples(self.folder, task):
            example = _example(line, path)
            if not example.weight:
                continue  # a document of no bytes
            if line["id"] in found:
                raise DataError(f"{path} has the example {line['id']} twice; evaluate again.")
            found[line["id"]] = example
        if not found:
            raise DataError(f"{path} holds no examples; evaluate {task} again.")
        return found


def _example(line: dict[str, Any], path: Path) -> ScoredExample:
    try:
        score, weight = float(line["score"]), float(line.get("weight", 1.0))
        is_usable = isinstance(line["id"], str) and math.isfinite(score) and weight >= 0
    except (KeyError, TypeError, ValueError):
        is_usable = False
    if not is_usable:
        raise DataError(
            f"{path} has the line {json.dumps(line)[:80]}, which is no example with an id, a"
            " finite score and a weight; evaluate again."
        )
    return ScoredExample(score, weight, bool(line.get("contaminated")))


def find_evaluated(source: str) -> Evaluated:
    """The evaluation that a word on the command line means: its folder, RUN (the newest step that
    was scored), RUN@STEP or RUN/checkpoints/step-N."""
    place = Path(source)
    if (place / SCORES_FILE).is_file():
        return Evaluated(place, read_scores(place)["tasks"])
    if (at_step := split_step(source)) is not None:
        return _of_run(RunDir(at_step[0]).require(), at_step[1])
    number = _step(place)
    if number is not None and place.resolve().parent.name == "checkpoints":
        return _of_run(RunDir(place.resolve().parent.parent).require(), number)
    if place.is_dir() and not (place / "run.json").is_file():
        raise DataError(
            f"{place} is neither a run nor a folder with {SCORES_FILE}; give one of them."
        )
    return _of_run(RunDir(place).require(), None)


def _of_run(run: RunDir, step: int | None) -> Evaluated:
    found = ((_step(path.parent), path.parent) for path in run.path.glob(f"evals/*/{SCORES_FILE}"))
    scored = {number: folder for number, folder in found if number is not None}
    if step is None and scored:
        step = max(scored)
    if step not in scored:
        known = ", ".join(map(str, sorted(scored))) or "none"
        what = f"{run.path}@{step}" if step is not None else str(run.path)
        raise NotScoredError(
            f"{what} has no scores of examples (steps that have: {known}); run"
            f" `foundling eval {what} TASK` first."
        )
    return Evaluated(scored[step], read_scores(scored[step])["tasks"])


def _step(path: Path) -> int | None:
    named = re.fullmatch(r"step-(\d+)", path.name)
    return int(named[1]) if named else None


LOWER_IS_BETTER = {BITS, "bpb", "bits_per_byte", "loss", "nll", "perplexity", "ppl"}
"""Metrics of which less is more; every other one is a share or a score."""
NO_SCORE = {TOKENS}
"""Metrics of which neither more nor less is better."""
ALIKE = ("limit", "dtype", "as_text", "samples", "temperature", "window")
"""How questions were put. The limit decides which solved examples come before one."""
LEAST = 5
"""Examples of which one model has all right and the other none, for p < 0.05."""
Side = Sequence[Evaluated]


@dataclass(frozen=True)
class _Task:
    """A task that both sides have."""

    name: str
    metric: str
    pairs: PairedScores
    is_clean: Any
    """True on the examples that no training text holds."""
    is_scanned: bool
    """Some examples are known to be in the training text."""
    seeds: dict[str, Any] | None
    unmatched: int
    """Examples that only one side has, and that are left out."""

    @property
    def lower(self) -> bool:
        return self.metric in LOWER_IS_BETTER

    @property
    def is_share(self) -> bool:
        scores = (self.pairs.a, self.pairs.b)
        return not self.lower and all(s.min() >= 0 and s.max() <= 1 for s in scores)


def compare(a: Sequence[str], b: Sequence[str], tasks: Sequence[str] = ()) -> dict[str, Any]:
    """What the scores of A and B say about each other; each side may be several runs (seeds)."""
    sides = [[find_evaluated(source) for source in side] for side in (a, b)]
    notes: list[str] = []
    found = [
        task
        for name in _common_tasks(sides, tasks, notes)
        if sides[0][0].tasks[name].get("metric") not in NO_SCORE
        and (task := _paired(name, sides, notes)) is not None
    ]
    if not found:
        why = f" ({'; '.join(notes)})" if notes else ""
        raise NotScoredError(f"A and B have no task in common that can be compared{why}.")
    table = {task.name: _verdict([task]) for task in found}
    for entry, adjusted in zip(
        table.values(), holm([entry["p"] for entry in table.values()]), strict=True
    ):
        entry["p_holm"] = adjusted
    for task in found:
        table[task.name] |= _details(task)
    together = _together(found, notes)
    return {
        "a": [str(one.folder) for one in sides[0]],
        "b": [str(one.folder) for one in sides[1]],
        "tasks": table,
        "all": {**_verdict(together), "tasks": [task.name for task in together]},
        "notes": notes,
    }


def _common_tasks(sides: Sequence[Side], wanted: Sequence[str], notes: list[str]) -> Iterator[str]:
    every = [set(one.tasks) for side in sides for one in side]
    common = set.intersection(*every)
    for name in wanted:
        if name not in common:
            raise DataError(f"{name} was not scored on both sides; evaluate it on both first.")
    if alone := sorted(set.union(*every) - common):
        notes.append(f"not on both sides: {', '.join(alone)}")
    yield from (name for name in sorted(common) if not wanted or name in wanted)


def _paired(name: str, sides: Sequence[Side], notes: list[str]) -> _Task | None:
    """A task's scores, example by example; several runs a side are averaged an example."""
    entries = [one.tasks[name] for side in sides for one in side]
    for field in ("metric", "shots"):
        values = list(dict.fromkeys(str(entry.get(field)) for entry in entries))
        if len(values) > 1:
            notes.append(f"{name} left out: {field} differs ({' and '.join(values)})")
            return None
    settings = [entry.get("settings") or {} for entry in entries]
    differing = [
        field
        for field in ("questions", *ALIKE)
        if len({str(one[field]) for one in settings if field in one}) > 1
    ]
    if "questions" in differing:  # an id means something else then
        notes.append(f"{name} left out: the questions are not the same; evaluate both on one file")
        return None
    if differing:
        told = ", ".join(differing).replace("_", " ")
        notes.append(f"{name}: not asked in the same way ({told}), which may be the difference")
    read = [[one.examples(name) for one in side] for side in sides]
    every_run = [examples for side in read for examples in side]
    ids = sorted(set.intersection(*map(set, every_run)))
    if not ids:
        notes.append(f"{name} left out: no example was put to both")
        return None
    first = every_run[0]
    means = [np.array([[one[i].score for i in ids] for one in side]) for side in read]
    weight = np.array([first[i].weight for i in ids])
    if any(not math.isclose(one[i].weight, first[i].weight) for one in every_run for i in ids):
        notes.append(f"{name}: the examples' weights differ; A's are used, were they the same?")
    seeds = over_seeds(*([float(np.average(run, weights=weight)) for run in m] for m in means))
    dirty = [any(one[i].contaminated for one in every_run) for i in ids]
    return _Task(
        name,
        str(entries[0].get("metric")),
        PairedScores(means[0].mean(0), means[1].mean(0), weight),
        ~np.array(dirty),
        any(dirty),
        asdict(seeds) if seeds else None,
        len(set.union(*map(set, every_run))) - len(ids),
    )


def _together(found: Sequence[_Task], notes: list[str]) -> list[_Task]:
    """The tasks whose mean means something: all shares, or all of one metric."""
    shares = [task for task in found if task.is_share]
    chosen = shares or [task for task in found if task.metric == found[0].metric]
    left = [task.name for task in found if task not in chosen]
    if left:
        notes.append(f"not in the mean of all, being on another scale: {', '.join(left)}")
    return chosen


def _verdict(tasks: Sequence[_Task]) -> dict[str, Any]:
    groups = [task.pairs for task in tasks]
    count = len(groups)
    gap = sum(pairs.difference for pairs in groups) / count
    stderr = math.sqrt(sum(pairs.stderr**2 for pairs in groups)) / count
    p = p_value(np.concatenate([pairs.parts for pairs in groups]) / count)
    n = sum(pairs.n for pairs in groups)
    times = times_as_many(gap, stderr)
    sure = p < ALPHA and gap != 0
    leads = "B" if (gap > 0) != tasks[0].lower else "A"
    return {
        "n": n,
        "a": sum(pairs.mean_a for pairs in groups) / count,
        "b": sum(pairs.mean_b for pairs in groups) / count,
        "difference": gap,
        "stderr": None if math.isnan(stderr) else stderr,
        "interval": [None if math.isnan(end) else end for end in interval(groups)],
        "p": p,
        "better": leads if sure else None,
        "needed": None if times is None else max(LEAST, math.ceil(times * n)),
        "least_seen": None if math.isnan(stderr) else SEEN * stderr,
    }


def _details(task: _Task) -> dict[str, Any]:
    more: dict[str, Any] = {"metric": task.metric, "seeds": task.seeds}
    if task.unmatched:
        more["unmatched"] = task.unmatched
    if task.is_scanned:
        clean = task.pairs.clean(task.is_clean)
        more["contaminated"] = int((~task.is_clean).sum())
        if clean.n:
            more["clean"] = {
                "n": clean.n,
                "difference": clean.difference,
                "p": p_value(clean.parts),
            }
    return more


def describe_verdict(found: Mapping[str, Any]) -> Iterator[str]:
    """The same for a person."""
    for letter, side in (("A", found["a"]), ("B", found["b"])):
        yield f"{letter}  {', '.join(side)}"
    yield ""
    rows = list(found["tasks"].items())
    width = max(len(name) for name, _ in [*rows, ("in all", None)])
    yield (
        f"{'':<{width}}  {'n':>7}  {'A':>8}  {'B':>8}  {'B - A':>8}  {'95% interval':>19}"
        f"  {'p':>7}  {'Holm':>7}  examples needed"
    )
    for name, entry in rows:
        yield _row(name, entry, width)
    if len(rows) > 1:
        yield _row("in all", found["all"], width)
    yield ""
    yield _sentence(found["all"])
    for name, entry in rows:
        yield from _asides(name, entry)
    yield from (f"note: {note}" for note in found["notes"])


def _row(name: str, entry: Mapping[str, Any], width: int) -> str:
    low, high = entry["interval"]
    span = "-" if low is None else f"{low:+.4f} to {high:+.4f}"
    holm_p = _chance(entry["p_holm"]) if "p_holm" in entry else ""
    needed = "-" if entry["needed"] is None else f"{entry['needed']:,}"
    return (
        f"{name:<{width}}  {entry['n']:>7,}  {entry['a']:>8.4f}  {entry['b']:>8.4f}"
        f"  {entry['difference']:>+8.4f}  {span:>19}  {_chance(entry['p']):>7}  {holm_p:>7}"
        f"  {needed}"
    )


def _chance(p: float) -> str:
    return f"{p:.4f}" if p >= 0.0001 else "<0.0001"


def _sentence(entry: Mapping[str, Any]) -> str:
    if entry["better"]:
        other = "A" if entry["better"] == "B" else "B"
        return f"{entry['better']} is better than {other} (p = {_chance(entry['p'])})."
    told = f"No difference is shown (p = {_chance(entry['p'])})"
    if entry["least_seen"]:
        told += (
            f"; {entry['n']:,} examples show one of {entry['least_seen']:.4f} four times of five"
        )
    return told + "."


def _asides(name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    if seeds := entry.get("seeds"):
        needed = (
            "" if seeds["needed"] is None else f", {seeds['needed']} seeds a side would show it"
        )
        yield (
            f"{name}: over seeds B - A is {seeds['difference']:+.4f}, p = {_chance(seeds['p'])}"
            f" (a run varies by {seeds['sd']:.4f}{needed})"
        )
    if "contaminated" in entry:
        clean = entry.get("clean")
        rest = (
            f"without them B - A is {clean['difference']:+.4f}, p = {_chance(clean['p'])}"
            if clean
            else "no others are left"
        )
        yield f"{name}: {entry['contaminated']:,} examples are in training text; {rest}"
    if "unmatched" in entry:
        yield f"{name}: {entry['unmatched']:,} examples that only one side has are left out"
