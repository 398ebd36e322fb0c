"""Results of an evaluation: files to go on from, tables to read, time left."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foundling.config.errors import DataError
from foundling.runtime.files import write_text_atomic
from foundling.runtime.run_dir import read_lines
from foundling.tasks.base import Score

# What an evaluation leaves behind, and what it can go on from.
#
# scores.json   every task's score, with what it rests on
# NAME.jsonl    one line an example: id, score, weight, perhaps contaminated
# NAME.part-R   the examples that rank R has done of a task that is not finished
#
# A part begins with a line that says what was asked (the weights, the questions, the arithmetic);
# one of another evaluation is thrown away. Ids do not depend on the model, so two evaluations can
# be compared example by example.

SCHEMA = 1
SCORES_FILE = "scores.json"
BITS, TOKENS = "bits per byte", "tokens"
"""Metrics: the less the better, and neither."""
TRAINING = "training, "
"""How the stamps of scores begin that a run wrote itself."""

Line = dict[str, Any]
Settings = Mapping[str, Any]


class Results:
    """The folder of one evaluation of one source."""

    def __init__(
        self,
        folder: Path,
        *,
        source: str,
        step: int,
        stamp: str = "",
        more: Mapping[str, Any] | None = None,
        fresh: bool = False,
        akin: str = "",
    ) -> None:
        """`stamp` tells the weights apart from others at the same place, and stamps that begin with
        `akin` are of the same weights; `more` goes into scores.json; `fresh` forgets what is
        there."""
        self.folder = folder
        self._head = {"source": source, "step": step, **(more or {})}
        self._stamp = stamp
        self.tasks: dict[str, dict[str, Any]] = {}
        self.core: dict[str, Any] | None = None
        known = read_scores(folder) if (folder / SCORES_FILE).is_file() and not fresh else {}
        theirs = str(known.get("stamp", stamp))
        is_ours = theirs == stamp or bool(akin and theirs.startswith(akin))
        if is_ours and known.get("step") == step:
            written = ("schema", "stamp", "time", "tasks", "core")
            kept = {name: value for name, value in known.items() if name not in written}
            self._head = {**kept, **self._head}
            self.tasks, self.core = known["tasks"], known.get("core")
        if fresh:
            for part in folder.glob("*.part-*"):
                part.unlink()

    def finished(self, name: str, settings: Settings) -> bool:
        """Whether a task was scored already, asked in the same way."""
        known = self.tasks.get(name)
        return known is not None and known.get("settings") == dict(settings)

    def done(self, name: str, settings: Settings) -> dict[str, Line]:
        """Examples that are done of a task that is not finished, by id."""
        lines: dict[str, Line] = {}
        for path in sorted(self.folder.glob(f"{name}.part-*")):
            first, *rest = read_lines(path) or [{}]
            if first == self._opening(settings):
                lines |= {line["id"]: line for line in rest}
            else:
                path.unlink(missing_ok=True)
        return lines

    def keep(self, name: str, settings: Settings, rank: int, lines: Iterable[Line]) -> None:
        """Write down a batch of examples; a kill tears one line at most."""
        path = self.folder / f"{name}.part-{rank}"
        text = "".join(json.dumps(line) + "\n" for line in lines)
        if not path.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self._opening(settings)) + "\n" + text
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)

    def close(self, name: str, entry: Mapping[str, Any], lines: Sequence[Line]) -> None:
        """A task is finished: its examples, its score, and no more parts."""
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_text_atomic(self.folder / f"{name}.jsonl", text)
        self.tasks[name] = dict(entry)
        self.write()
        for part in self.folder.glob(f"{name}.part-*"):
            with contextlib.suppress(OSError):
                part.unlink()

    def close_all(self, tasks: Mapping[str, tuple[Mapping[str, Any], Sequence[Line]]]) -> None:
        """Finish several: by name, what scores.json says of each and its examples."""
        for name, (entry, lines) in tasks.items():
            self.close(name, entry, lines)

    def write(self) -> None:
        """scores.json as it is now."""
        scores = {
            "schema": SCHEMA,
            **self._head,
            "stamp": self._stamp,
            "time": time.time(),
            "tasks": self.tasks,
            "core": self.core,
        }
        write_text_atomic(self.folder / SCORES_FILE, json.dumps(scores, indent=2) + "\n")

    def _opening(self, settings: Settings) -> dict[str, Any]:
        return {"stamp": self._stamp, "settings": dict(settings)}


def read_scores(folder: Path) -> dict[str, Any]:
    """scores.json of a folder."""
    path = folder / SCORES_FILE
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        schema, _ = found["schema"], dict(found["tasks"])
    except FileNotFoundError:
        raise DataError(f"{folder} holds no scores.json; evaluate into it first.") from None
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is damaged; delete it and evaluate again.") from None
    if schema != SCHEMA:
        raise DataError(
            f"{path} has schema {schema} and this version reads {SCHEMA}; use the"
            " version of foundling that wrote it."
        )
    return found


def read_examples(folder: Path, name: str) -> list[Line]:
    """The lines of a finished task."""
    return read_lines(folder / f"{name}.jsonl")


def mean_score(name: str, lines: Sequence[Line]) -> Score:
    """The weighted mean of the examples' scores and its standard error, which for right and wrong
    of equal weight is the binomial one."""
    weights = [float(line.get("weight", 1.0)) for line in lines]
    total = sum(weights)
    if not total:
        raise DataError(f"{name} has no examples to score.")
    pairs = list(zip(weights, lines, strict=True))
    value = sum(weight * line["score"] for weight, line in pairs) / total
    spread = sum((weight * (line["score"] - value)) ** 2 for weight, line in pairs)
    return Score(name=name, value=value, n=len(lines), stderr=math.sqrt(spread) / total)


def plain_entry(name: str, lines: Sequence[Line], metric: str) -> dict[str, Any]:
    """What scores.json says of any task."""
    score = mean_score(name, lines)
    return {"value": score.value, "metric": metric, "n": score.n, "stderr": score.stderr}


def apart(name: str, lines: Sequence[Line]) -> dict[str, Any]:
    """The scores of contaminated examples and of the others, where somebody has looked."""
    if not any("contaminated" in line for line in lines):
        return {}
    parts = {
        "clean": [line for line in lines if not line.get("contaminated")],
        "contaminated": [line for line in lines if line.get("contaminated")],
    }
    return {
        part: mean_score(name, some).to_json() if some else {"value": None, "n": 0}
        for part, some in parts.items()
    }


def describe_tasks(scores: Mapping[str, Any], names: Container[str] | None = None) -> list[str]:
    """For a person: one line a task, then CORE; where `names` are given, no others that the folder
    has."""
    lines = [f"{'task':<34} {'value':>8} {'±':>7} {'centred':>8} {'n':>7}"]
    for name, entry in scores["tasks"].items():
        if names is not None and name not in names:
            continue
        middle = entry.get("centered")
        told = "" if middle is None else f"{middle:.4f}"
        lines.append(
            f"{entry.get('name', name):<34} {entry['value']:>8.4f} {entry['stderr']:>7.4f}"
            f" {told:>8} {entry['n']:>7,}"
        )
        lines += _details(entry)
    core = scores.get("core")
    if core and (names is None or "core" in names):
        lines.append(
            f"{_core_name(core):<34} {core['value']:>8.4f} {core['stderr']:>7.4f} {'':>8}"
            f" {core['n']:>7,}"
        )
        if core["partial"]:
            lines.append(f"  not CORE: {', '.join(core['missing'])} missing")
        if core.get("shots") is not None:
            lines.append(
                "  not CORE: --shots replaced the suite's own numbers of solved examples; leave it"
                " out to compare with others"
            )
    return lines


def _core_name(core: Mapping[str, Any]) -> str:
    """`core_partial_5_shots` for a person."""
    marks = ["CORE", *(["partial"] if core["partial"] else [])]
    shots = core.get("shots")
    return ", ".join(marks if shots is None else [*marks, f"--shots {shots}"])


def _details(entry: Mapping[str, Any]) -> list[str]:
    """What a score has besides its value."""
    named = [name for name in entry if name == "f1" or name.startswith("pass@")]
    lines = [f"  {name} {entry[name]:.4f}" for name in named]
    if "version" in entry:  # lm-eval's, which has several measures
        lines.append(f"  {entry['metric']}, {entry['shots'] or 0} shots")
    if "perplexity_per_token" in entry:
        lines.append(f"  perplexity {entry['perplexity_per_token']:.3f} a token")
    for name, part in entry.get("by_source", {}).items():
        lines.append(f"  {name}: {part['value']:.4f} bits per byte ({part['bytes']:,} bytes)")
    for name in ("clean", "contaminated"):
        if name in entry:
            part = entry[name]
            value = "" if part["value"] is None else f" {part['value']:.4f} ±{part['stderr']:.4f}"
            lines.append(f"  {name}:{value} ({part['n']:,} examples)")
    for prompt, text in entry.get("texts", {}).items():
        lines.append(f"  {prompt}{text!r}")
    return lines


EVERY_S = 5.0


class Clock:
    """Counts the examples of one task and tells at most every few seconds."""

    def __init__(self, name: str, total: int, tell: Callable[[str], None] | None) -> None:
        self._name, self._total, self._tell = name, total, tell
        self._done = 0
        self._began = self._told = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the task began."""
        return time.monotonic() - self._began

    def add(self, count: int) -> None:
        """So many more are done."""
        self._done += count
        now = time.monotonic()
        ended = self._done >= self._total
        if self._tell is None or (now - self._told < EVERY_S and not ended):
            return
        self._told = now
        left = self.seconds / max(self._done, 1) * (self._total - self._done)
        rest = f"{self.seconds:.1f} s" if ended else f"about {left:.0f} s left"
        self._tell(f"  {self._name}: {self._done:,} of {self._total:,} examples, {rest}")
