"""Lineage of a model: the stages of its life, and the tokens it was trained on, by source."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from foundling.plan.supply import with_shares
from foundling.report.markup import Markup, compact, join, percent, table, tag
from foundling.report.svg_chart import Bin, BinWidth, by_width
from foundling.runtime.run_dir import RunDir
from foundling.runtime.run_reader import Line, Points, RunData, is_number, number, read_ledger

# What a model was trained on in its whole life: its own ledger and its ancestors', source by
# source.
#
# A run that starts from another's weights adds to the tokens those weights were trained on: the
# parent's ledger up to the step they were taken from, and so on up the line. Restarts need no care,
# because a resume cuts the lines after its checkpoint.


@dataclass(frozen=True)
class TokensOfLife:
    """What one run added."""

    path: str
    stage: str
    steps: int
    sources: dict[str, dict[str, float]]
    """By source: units, positions, tokens, targets, and epochs (how often it was read)."""
    missing: str = ""
    """Why nothing is known, in a sentence."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, with each source's share of the run's units and tokens."""
        return {**asdict(self), "sources": with_shares(self.sources)}


def tokens_of_life(run: RunDir) -> list[TokensOfLife]:
    """What a run and each of its ancestors added, oldest first."""
    found: list[TokensOfLife] = []
    seen = set()
    here: RunDir | None = run
    last: int | None = None
    while here is not None and here.path.resolve() not in seen:
        seen.add(here.path.resolve())
        info = here.read_info()
        found.insert(0, _tokens_of_run(here, info, last))
        stated, here = info.get("parent"), here.parent()
        if not stated:
            break
        last = int(stated["step"])
        if here is None:
            missing = f"{stated['path']} is not there, and its tokens are not counted."
            found.insert(0, TokensOfLife(str(stated["path"]), "unknown", last, {}, missing))
    return found


def _tokens_of_run(run: RunDir, info: Line, last: int | None) -> TokensOfLife:
    """One run's ledger, up to the step `last` if one is given."""
    sources, steps = read_ledger(run, math.inf if last is None else last)
    untold = info.get("status") == "finished" and not run.metrics_path.is_file()
    missing = f"{run.path} has no metrics.jsonl, and its tokens are not counted." if untold else ""
    stage = "chat" if info.get("chat") else "text"
    return TokensOfLife(str(run.path), stage, steps, sources, missing)


def reading(data: RunData) -> Markup:
    """The same for one run's chapter of the page."""
    sources = with_shares(data.ledger)
    if not sources:
        return Markup("")
    rows = [
        [
            name,
            f"{counts['units']:,}",
            compact(counts["tokens"]),
            compact(counts["targets"]),
            f"{counts['epochs']:.3f}",
            percent(counts["units_share"]),
            percent(counts["tokens_share"]),
        ]
        for name, counts in sources.items()
    ]
    head = ["", "units", "tokens", "targets", "epochs", "share of units", "share of tokens"]
    caption = "Units are packed rows; targets are the tokens that the loss counted"
    return join([tag("h3", "What it read"), table(caption, head, rows)])


# The whole life of a model as one line of tokens: which stage read which, and what it scored when.
#
# A run that began with another's weights counts on from the tokens those weights were trained on. A
# branch has its parent's lines up to the step it left at in its own files, counted from the same
# beginning, so it is laid over its parent and only what came after is its own.

SHARE = "quiz"
CLOCKED = ("bpb", "loss", "full_bpb", "full_loss")


@dataclass(frozen=True)
class LifeStage:
    """One run's part of a life."""

    data: RunData
    offset: float
    """Tokens before this run's own count begins."""
    begin: float
    """Tokens of the whole life at which the run begins to count in it."""
    end: float
    """And at which it ends, or the next one takes over."""

    def own(self, tokens: Any) -> Any:
        """Whether a place in the whole life, or each of an array of them, is this stage's."""
        return (self.begin < tokens) & (tokens <= self.end) | (self.begin == 0) & (tokens == 0)

    def loss(self) -> Points:
        """The training loss against the tokens of the whole life."""
        points = self._of_life("loss")
        return points.compress(self.own(points[:, 0]), axis=0)

    def _of_life(self, field: str) -> Points:
        points: Points = self.data.curve(field) + np.array([self.offset, 0.0])
        return points

    def loss_bins(self, width: BinWidth) -> list[Bin]:
        """The same in bins of that width; in steps, of those that the run counts itself."""
        if width.unit == "tokens":
            return by_width(self.loss(), width.size)
        points = self.loss()
        tokens, steps = self._of_life("step").T
        last = np.searchsorted(tokens, points[:, 0], side="right") - 1
        return by_width(points, width.size, steps[last] - 1)


def stages_of(lineage: Sequence[RunData]) -> list[LifeStage]:
    """The stages of a lineage, oldest first."""
    found: list[LifeStage] = []
    offset = begin = 0.0
    for place, data in enumerate(lineage):
        after = lineage[place + 1] if place + 1 < len(lineage) else None
        left = None if after is None else number(_parent(after), "step")
        read = data.total_tokens if left is None else data.tokens_by(int(left))
        end = max(begin, offset + read)
        found.append(LifeStage(data, offset, begin, end))
        if after is not None and _parent(after).get("kind") != "branch":
            offset = end
        begin = end
    return found


def _parent(data: RunData) -> Mapping[str, Any]:
    stated = data.info.get("parent")
    return stated if isinstance(stated, Mapping) else {}


@dataclass(frozen=True)
class Scored:
    """One score at one place of a life."""

    tokens: float
    value: float
    stderr: float


Series = dict[str, list[tuple[LifeStage, list[Scored]]]]
"""By score: each stage that has it, with its points in order."""


def score_series(stages: Sequence[LifeStage]) -> Series:
    """Every score that any run of the lineage has, wherever it was written down."""
    found: Series = {}
    for stage in stages:
        own: dict[str, dict[float, Scored]] = {}
        for name, step, value, stderr in _scores(stage.data):
            tokens = stage.offset + stage.data.tokens_by(step)
            if stage.own(tokens):
                own.setdefault(name, {})[tokens] = Scored(tokens, value, stderr)
        for name, points in own.items():
            found.setdefault(name, []).append((stage, [points[x] for x in sorted(points)]))
    return dict(sorted(found.items(), key=lambda item: _rank(item[0])))


def _rank(name: str) -> tuple[int, str]:
    """The few that matter most."""
    first = ("core", *CLOCKED, SHARE)
    return (first.index(name), "") if name in first else (len(first), name)


def _scores(data: RunData) -> Iterator[tuple[str, int, float, float]]:
    """(score, step, value, standard error); a later source of the same place wins."""
    for line in data.evals:
        step = line.get("step")
        if is_number(step):
            yield from _clocked(line, int(step or 0))
    step = number(data.final, "step")
    at = data.steps if step is None else int(step)
    if (bits := number(data.final, "full_bpb")) is not None:
        yield "full_bpb", at, bits, 0.0
    yield from _entry(SHARE, at, data.final.get("quiz"), "accuracy")
    for at, scores in data.scored.items():
        tasks = scores.get("tasks")
        for name, entry in tasks.items() if isinstance(tasks, Mapping) else ():
            # Of some held-out documents only it is another score, and no point of this one.
            named = entry.get("name", name) if isinstance(entry, Mapping) else name
            yield from _entry(str(named), at, entry, "value")
        core = scores.get("core")
        # Of some of its tasks, or with other shots, it is another score, and no point of this one.
        named = core.get("name", "core") if isinstance(core, Mapping) else "core"
        yield from _entry(str(named), at, core, "value")


def _clocked(line: Line, step: int) -> Iterator[tuple[str, int, float, float]]:
    for name in CLOCKED:
        if (value := number(line, name)) is not None:
            yield name, step, value, 0.0
    sources = line.get("sources")
    if not isinstance(sources, Mapping) or len(sources) < 2:
        return
    for source, scores in sources.items():
        for name in CLOCKED:
            if isinstance(scores, Mapping) and (value := number(scores, name)) is not None:
                yield f"{name} of {source}", step, value, 0.0


def _entry(name: str, step: int, entry: Any, field: str) -> Iterator[tuple[str, int, float, float]]:
    if isinstance(entry, Mapping) and (value := number(entry, field)) is not None:
        yield name, step, value, number(entry, "stderr") or 0.0
