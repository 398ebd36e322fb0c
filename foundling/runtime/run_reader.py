"""Reader of run directories: every file is read line by line, and none is taken to be complete.

A report is most wanted when a run has gone wrong, so a missing or torn file leaves its part of the
page out and never stops the page. Of metrics.jsonl, which has a line for every step, only numbers
are kept: a float64 for each field and step, and the sums of what was read. Rejected: to bin the
curves while they are read (how wide a bin is depends on the last line, and what of it is shown on
the runs that follow).

events.jsonl is never cut. What it measured above the step that the run then resumed at, or was
rolled back to, is of a course that was given up, and is forgotten here; what happened never is.
"""

import json
import math
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundling.config.errors import UserError
from foundling.config.run import RunConfig
from foundling.runtime.run_dir import COUNTS, RunDir, each_line

Line = Mapping[str, Any]
_Column = NDArray[np.float64]
Points = NDArray[np.float64]
"""(n, 2): x and y of each point of a curve."""
_Totals = dict[str, dict[str, float]]
"""By source: units, positions, tokens, targets, and epochs (how often it was read)."""
_METRICS = (
    *("step", "total_tokens", "loss", "lr", "grad_norm", "update_ratio", "non_padding"),
    *("tokens_per_s", "mfu", "matmul_share", "step_s"),
)
"""Fields of metrics.jsonl that are kept of every step."""
_MEASUREMENTS = ("evaluated", "sampled", "scored", "evaluated_by_hand")
"""Events that say something of the weights at a step: held-out scores, samples and tasks on the
run's clock, and what `foundling eval RUN` found."""
_GUARD_EVENTS = ("batch_left_out", "rolled_back")
"""Events that the run is repeated by: each is on the disk before anything is done by it."""
_TAIL_BYTES = (1 << 12, 1 << 16, 1 << 20)
"""How much of a file's end is read for its last line, until there is one."""


def is_number(value: object) -> bool:
    """Whether a value read from JSON is a finite number, and none too large for a float."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and -sys.float_info.max <= value <= sys.float_info.max
    )


def number(line: Line, field: str) -> float | None:
    """A field's value if it is a finite number."""
    value = line.get(field)
    return float(value) if value is not None and is_number(value) else None


def _columns(lines: Iterable[Line]) -> tuple[dict[str, _Column], Line]:
    """The fields `_METRICS` of every line as arrays, nan where it has no number; and the last line
    whole."""
    last: Line = {}
    columns = {name: array("d") for name in _METRICS}
    for line in lines:
        last = line
        for name, column in columns.items():
            value = line.get(name)
            is_plain = type(value) is float or is_number(value)  # most are, and of a million
            column.append(value if is_plain else math.nan)  # type: ignore[arg-type]
    return {name: np.array(column) for name, column in columns.items()}, last


def numbers_of(tree: object, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a nested mapping, by its dotted name."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from numbers_of(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, (int, float)) and is_number(tree):
        yield prefix, tree


def points_of(lines: Iterable[Line], x: str, y: str) -> Points:
    """One field of some lines against another, without the lines that lack either."""
    values = [(number(line, x), number(line, y)) for line in lines]
    return np.array([pair for pair in values if None not in pair], dtype=float).reshape(-1, 2)


def _in_order(points: Points) -> Points:
    x, y = points.T
    return points if (x[1:] > x[:-1]).all() else points[np.lexsort((y, x))]


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """How far a run has come: run.json and the last line of metrics.jsonl."""

    run: RunDir
    info: Line
    last: Line
    damage: Sequence[str]
    """Which files have lines that cannot be read, which are left out here."""

    @property
    def name(self) -> str:
        return self.run.path.resolve().name

    @property
    def stage(self) -> str:
        """What it was trained on: text, or chat as soon as it or its parent had conversations."""
        return "chat" if self.info.get("chat") else "text"

    @property
    def status(self) -> str:
        if self.damage:
            return "damaged"
        return str(self.info.get("status", "unknown"))

    @property
    def parent(self) -> str:
        """Path of the run whose weights this one started from, as it was then; empty if fresh."""
        stated = self.info.get("parent")
        if isinstance(stated, Mapping):
            stated = stated.get("path")
        return str(stated) if stated else ""

    @property
    def steps(self) -> int:
        return int(number(self.last, "step") or 0)

    @property
    def total_tokens(self) -> int:
        return int(number(self.last, "total_tokens") or 0)


@dataclass(frozen=True, kw_only=True)
class RunData(RunSummary):
    """The contents of one run directory."""

    config: RunConfig | None
    config_problem: str
    """Why there is no config, in a sentence; empty if there is one."""
    metrics: Mapping[str, _Column]
    """Fields of metrics.jsonl, nan where a step has no number."""
    ledger: _Totals
    """What was read, by source."""
    evals: Sequence[Line]
    """Held-out scores on the run's clock."""
    samples: Sequence[Line]
    """One line a step and prompt: step, prompt, text."""
    events: Sequence[Line]
    """What happened, measurements left out."""
    final: Line
    """The last result of `foundling eval RUN`, or nothing."""
    scored: Mapping[int, Line]
    """By step: evals/step-N/scores.json."""

    @property
    def started(self) -> float | None:
        """Time of day of the first thing that happened."""
        return min(self._times, default=None)

    @property
    def ended(self) -> float | None:
        """Time of day of the last thing that happened."""
        return max(self._times, default=None)

    @property
    def _times(self) -> list[float]:
        return [float(line["time"]) for line in self.events if is_number(line.get("time"))]

    @property
    def training_seconds(self) -> float:
        """Seconds spent in steps that count, however often the run was interrupted."""
        seconds = self.metrics["step_s"]
        return float(seconds[np.isfinite(seconds)].sum())

    def points(self, x: str, y: str) -> Points:
        """One column of the metrics against another, without the steps that lack either."""
        points = np.column_stack([self.metrics[x], self.metrics[y]])
        return points[np.isfinite(points).all(axis=1)]

    def curve(self, field: str) -> Points:
        """A column of the metrics against tokens; steps without a finite value are left out."""
        return _in_order(self.points("total_tokens", field))

    def eval_curve(self, field: str) -> Points:
        """A column of the clocked evaluations against tokens."""
        lines = ({"total_tokens": self.tokens_by(line["step"]), **line} for line in self.evals)
        return _in_order(points_of(lines, "total_tokens", field))

    def tokens_by(self, step: int) -> float:
        """Tokens read by the end of a step, or of the last one before it that is known."""
        steps, tokens = self._known_tokens
        place = int(np.searchsorted(steps, float(step), side="right")) - 1
        return float(tokens[max(place, 0)])

    @cached_property
    def _known_tokens(self) -> tuple[_Column, _Column]:
        """Steps in order, and the tokens read by the end of each; step 0 has read none."""
        known = np.vstack([np.zeros((1, 2)), self.points("step", "total_tokens")])
        steps, tokens = known[np.argsort(known[:, 0], kind="stable")].T
        return steps, tokens


def read_run(run: RunDir) -> RunData:
    """Everything that is shown of a run directory; only run.json must be there."""
    info = run.read_info()
    config, problem = _read_config(run)
    damaged: Counter[str] = Counter()
    ledger: _Totals = {}
    metrics, last = _columns(_added_to(ledger, step_lines(run, damaged), damaged))
    story = read_events(run, damaged)
    return RunData(
        run=run,
        info=info,
        last=last,
        damage=_damage_sentences(damaged),
        config=config,
        config_problem=problem,
        metrics=metrics,
        ledger=ledger,
        evals=story.measured["evaluated"],
        samples=_flat_samples(story.measured["sampled"]),
        events=story.facts,
        final=(story.measured["evaluated_by_hand"] or [{}])[-1],
        scored=_read_scored(run),
    )


@dataclass(frozen=True)
class EventLog:
    """The contents of events.jsonl."""

    facts: Sequence[Line]
    """What happened, in order."""
    measured: Mapping[str, Sequence[Line]]
    """By kind: what was measured on the course that the run is on."""

    @property
    def record(self) -> list[Line]:
        """What the guard has done, in order."""
        return [line for line in self.facts if line["event"] in _GUARD_EVENTS]


def read_events(run: RunDir, damaged: Counter[str] | None = None) -> EventLog:
    """What events.jsonl says; damaged lines are left out and counted."""
    facts: list[Line] = []
    measured: list[Line] = []
    for line in each_line(run.events_path):
        kind = line.get("event") if line is not None else None
        if line is None or not isinstance(kind, str) or _lacks_step(line, kind):
            if damaged is not None:
                damaged[run.events_path.name] += 1
            continue
        if kind in _MEASUREMENTS:
            measured.append(line)
            continue
        facts.append(line)
        if kind in _GOES_BACK and (back_to := line.get(_GOES_BACK[kind])) is not None:
            measured = [one for one in measured if one["step"] <= back_to]
    by_kind = {kind: [m for m in measured if m["event"] == kind] for kind in _MEASUREMENTS}
    return EventLog(facts, by_kind)


_GOES_BACK = {"resumed": "step", "rolled_back": "back_to"}
"""Events after which the run stands at a step, and their field that names it."""


def _lacks_step(line: Line, kind: str) -> bool:
    """Whether an event does not say the step that it is known by."""
    field = "step" if kind in _MEASUREMENTS else _GOES_BACK.get(kind)
    return field is not None and type(line.get(field)) is not int


def final_scores(run: RunDir) -> dict[str, Any]:
    """The last result of `foundling eval RUN`, or nothing."""
    return dict((read_events(run).measured["evaluated_by_hand"] or [{}])[-1])


def _damage_sentences(damaged: Counter[str]) -> list[str]:
    return [f"{name} has {n} damaged line{'s' * (n > 1)}" for name, n in damaged.items()]


def read_summary(run: RunDir) -> RunSummary:
    """A run's line in a list of runs, by run.json and the end of metrics.jsonl alone: damage
    further up, or in another file, is not looked for."""
    damaged: Counter[str] = Counter()
    last = last_line(run, damaged)
    return RunSummary(run=run, info=run.read_info(), last=last, damage=_damage_sentences(damaged))


def last_line(run: RunDir, damaged: Counter[str] | None = None) -> Line:
    """The last sound line of metrics.jsonl, read from its end; what stands before it is not looked
    at."""
    damaged = Counter() if damaged is None else damaged
    last: Line = {}
    for size in _TAIL_BYTES:
        damaged.clear()
        for line in step_lines(run, damaged, size):
            last = line
            damaged.clear()
        if last:
            break
    return last


def step_lines(
    run: RunDir, damaged: Counter[str] | None = None, last_bytes: int = 0
) -> Iterator[Line]:
    """The lines of metrics.jsonl, or those of its last bytes; damaged ones are left out and
    counted."""
    for line in each_line(run.metrics_path, last_bytes):
        step = line and line.get("step")
        if line is not None and type(step) is int and is_number(step):
            yield line
        elif damaged is not None:
            damaged[run.metrics_path.name] += 1


def read_ledger(run: RunDir, last: float = math.inf) -> tuple[_Totals, int]:
    """What was read by the end of step `last`, by source, with the epochs where they were left; and
    the last step that is counted."""
    total: _Totals = {}
    steps = 0
    wanted = (line for line in step_lines(run) if line["step"] <= last)
    for line in _added_to(total, wanted, Counter()):
        steps = max(steps, line["step"])
    return total, steps


def _added_to(total: _Totals, lines: Iterable[Line], damaged: Counter[str]) -> Iterator[Line]:
    """The same lines, each added up by source on its way."""
    for line in lines:
        sources = line.get("sources")
        if sources is None or not _is_counted(sources):
            damaged["metrics.jsonl"] += 1
            continue
        for name, counts in sources.items():
            row = total.get(name, {})
            summed = {field: row.get(field, 0) + counts[field] for field in COUNTS}
            total[name] = {**summed, "epochs": counts["epochs"]}
        yield line


def _is_counted(sources: Any) -> bool:
    return isinstance(sources, dict) and all(
        isinstance(counts, dict) and all(is_number(counts.get(f)) for f in (*COUNTS, "epochs"))
        for counts in sources.values()
    )


def read_lineage(run: RunDir) -> list[RunData]:
    """The run and its ancestors that are still there, oldest first."""
    chain = [read_run(run)]
    seen = {run.path.resolve()}
    while (parent := chain[0].run.parent()) and parent.path.resolve() not in seen:
        seen.add(parent.path.resolve())
        chain.insert(0, read_run(parent))
    return chain


def _flat_samples(lines: Iterable[Line]) -> list[Line]:
    """A step's samples are one event; a table wants a line for each prompt of it."""
    flat: list[Line] = []
    for line in lines:
        said = line.get("samples")
        for one in said if isinstance(said, list) else ():
            if isinstance(one, dict) and {"prompt", "text"} <= one.keys():
                texts = {"prompt": str(one["prompt"]), "text": str(one["text"])}
                flat.append({"step": line["step"], **texts})
    return flat


def _read_config(run: RunDir) -> tuple[RunConfig | None, str]:
    from foundling.config.load import load_run_config

    if not run.config_path.is_file():
        return None, "the run holds no config.yaml."
    try:
        return load_run_config(run.config_path), ""
    except UserError as error:
        return None, str(error)


def _read_scored(run: RunDir) -> dict[int, Line]:
    found = {}
    for path in (run.path / "evals").glob("step-*/scores.json"):
        number = path.parent.name.removeprefix("step-")
        if number.isdigit():
            found[int(number)] = _read_json(path)
    return dict(sorted(found.items()))


def _read_json(path: Path) -> Line:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
