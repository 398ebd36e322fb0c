"""A run directory as a report sees it: everything read once, nothing assumed to be complete.

A report is most wanted when a run has gone wrong, so a missing or torn file leaves its part of the
page out and never stops the page.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from foundling.config.errors import UserError
from foundling.config.run import RunConfig
from foundling.runtime.run_dir import COUNTS, RunDir, read_lines, scan_lines

Line = Mapping[str, Any]
Points = list[tuple[float, float]]
FINAL_EVAL_NAME = "eval.json"


@dataclass(frozen=True)
class RunData:
    """One run, read."""

    run: RunDir
    info: Line
    config: RunConfig | None
    config_problem: str
    """Why there is no config, in a sentence; empty if there is one."""
    metrics: Sequence[Line]
    evals: Sequence[Line]
    samples: Sequence[Line]
    """One line a step and prompt: step, prompt, text."""
    events: Sequence[Line]
    final: Line
    """The result of `foundling eval`, or nothing."""
    scored: Mapping[int, Line]
    """By step: evals/step-N/scores.json."""
    damage: Sequence[str]
    """Which files have lines that cannot be read, which are left out here."""

    @property
    def name(self) -> str:
        return self.run.path.resolve().name

    @property
    def stage(self) -> str:
        if "stage" in self.info:
            return str(self.info["stage"])
        return self.config.train.stage if self.config else "run"

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
        return int(self.metrics[-1].get("step", 0)) if self.metrics else 0

    @property
    def total_tokens(self) -> int:
        return int(self.metrics[-1].get("total_tokens", 0)) if self.metrics else 0

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
        return sum(float(line["step_s"]) for line in self.metrics if is_number(line.get("step_s")))

    def curve(self, field: str) -> Points:
        """A column of the metrics against tokens; steps without a finite value are left out."""
        return _column(self.metrics, field, self._tokens_at)

    def eval_curve(self, field: str) -> Points:
        """A column of the clocked evaluations against tokens."""
        return _column(self.evals, field, self._tokens_at)

    def tokens_by(self, step: int) -> float:
        """Tokens eaten by the end of a step, or of the last one before it that is known."""
        known = self._tokens_at.get(step)
        if known is not None:
            return known
        return max((n for at, n in self._tokens_at.items() if at <= step), default=0.0)

    @cached_property
    def _tokens_at(self) -> Mapping[int, float]:
        """Tokens eaten by the end of each step; step 0 has eaten none."""
        return {0: 0.0} | {
            int(line["step"]): float(line["total_tokens"])
            for line in self.metrics
            if "step" in line and is_number(line.get("total_tokens"))
        }


def _column(lines: Sequence[Line], field: str, tokens_at: Mapping[int, float]) -> Points:
    points = []
    for line in lines:
        tokens = line.get("total_tokens", tokens_at.get(int(line.get("step", -1))))
        if is_number(tokens) and is_number(line.get(field)):
            points.append((float(tokens), float(line[field])))
    return sorted(points)


def is_number(value: object) -> bool:
    """Whether a value read from JSON is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def number(line: Line, field: str) -> float | None:
    """A field's value if it is a finite number."""
    value = line.get(field)
    return float(value) if value is not None and is_number(value) else None


def read_run(run: RunDir) -> RunData:
    """Everything a run directory holds; only run.json must be there."""
    info = run.read_info()
    config, problem = _read_config(run)
    stepped = (run.metrics_path, run.evals_path, run.samples_path, run.task_scores_path)
    read = {path: stepped_lines(path) for path in stepped}
    read[run.ledger_path] = ledger_lines(run)
    return RunData(
        run=run,
        info=info,
        config=config,
        config_problem=problem,
        metrics=read[run.metrics_path][0],
        evals=read[run.evals_path][0],
        samples=_flat_samples(read[run.samples_path][0]),
        events=read_lines(run.events_path),
        final=_read_json(run.path / FINAL_EVAL_NAME),
        scored=_read_scored(run),
        damage=[
            f"{path.name} has {count} damaged line{'s' * (count > 1)}"
            for path, (_, count) in read.items()
            if count
        ],
    )


def stepped_lines(path: Path) -> tuple[list[Line], int]:
    """The lines of a file that has one a step, and how many of them are damaged."""
    lines, damaged = scan_lines(path)
    sound: list[Line] = [line for line in lines if type(line.get("step")) is int]
    return sound, damaged + len(lines) - len(sound)


def ledger_lines(run: RunDir) -> tuple[list[Line], int]:
    """The same of ledger.jsonl, of which sums are made."""
    lines, damaged = stepped_lines(run.ledger_path)
    sound = [line for line in lines if _is_counted(line.get("sources"))]
    return sound, damaged + len(lines) - len(sound)


def _is_counted(sources: object) -> bool:
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


def _flat_samples(lines: Sequence[Line]) -> list[Line]:
    """samples.jsonl has a line a step; a table wants one for each prompt of it."""
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
