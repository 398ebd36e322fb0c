"""Where a model's scores lie: a run, one of its checkpoints, or any folder of an evaluation."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundling.config.errors import DataError, RunError
from foundling.runtime.rundir import RunDir, read_lines

SCORES = "scores.json"
SCHEMA = 1


@dataclass(frozen=True)
class Example:
    """One line of a task."""

    score: float
    weight: float
    contaminated: bool


@dataclass(frozen=True)
class Evaluated:
    """One evaluation: the tasks' entries, and their examples on demand."""

    folder: Path
    step: int
    tasks: dict[str, dict[str, Any]]

    def examples(self, task: str) -> dict[str, Example]:
        """A task's examples by id."""
        path = self.folder / f"{task}.jsonl"
        found: dict[str, Example] = {}
        for line in read_lines(path):
            example = _example(line, path)
            if not example.weight:
                continue  # a document of no bytes
            if line["id"] in found:
                raise DataError(f"{path} has the example {line['id']} twice; evaluate again.")
            found[line["id"]] = example
        if not found:
            raise DataError(f"{path} holds no examples; evaluate {task} again.")
        return found


def _example(line: dict[str, Any], path: Path) -> Example:
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
    return Example(score, weight, bool(line.get("contaminated")))


def find_evaluated(source: str) -> Evaluated:
    """The evaluation that a word on the command line means: its folder, RUN (the newest step that
    was scored), RUN@STEP or RUN/checkpoints/step-N."""
    place = Path(source)
    if (place / SCORES).is_file():
        return _read(place)
    at_step = re.fullmatch(r"(.+)@(\d+)", source)
    if at_step and not place.exists():
        return _of_run(RunDir(at_step[1]).require(), int(at_step[2]))
    number = _step(place)
    if number is not None and place.resolve().parent.name == "checkpoints":
        return _of_run(RunDir(place.resolve().parent.parent).require(), number)
    if place.is_dir() and not (place / "run.json").is_file():
        raise DataError(f"{place} is neither a run nor a folder with {SCORES}; give one of them.")
    return _of_run(RunDir(place).require(), None)


def _of_run(run: RunDir, step: int | None) -> Evaluated:
    scored = {number: path.parent for path, number in _scored(run)}
    if step is None and scored:
        step = max(scored)
    if step not in scored:
        known = ", ".join(map(str, sorted(scored))) or "none"
        what = f"{run.path}@{step}" if step is not None else str(run.path)
        raise RunError(
            f"{what} has no scores of examples (steps that have: {known}); run"
            f" `foundling eval {what} TASK` first."
        )
    return _read(scored[step])


def _scored(run: RunDir) -> list[tuple[Path, int]]:
    found = [(path, _step(path.parent)) for path in (run.path / "evals").glob(f"*/{SCORES}")]
    return [(path, number) for path, number in found if number is not None]


def _step(path: Path) -> int | None:
    named = re.fullmatch(r"step-(\d+)", path.name)
    return int(named[1]) if named else None


def _read(folder: Path) -> Evaluated:
    path = folder / SCORES
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        schema, tasks, step = found["schema"], dict(found["tasks"]), int(found.get("step", 0))
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is damaged; evaluate again.") from None
    if schema != SCHEMA:
        raise DataError(
            f"{path} has schema {schema} and this version reads {SCHEMA}; use the version of"
            " foundling that wrote it."
        )
    return Evaluated(folder, step, tasks)
