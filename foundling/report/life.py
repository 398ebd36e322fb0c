"""The whole life of a model as one line of tokens: which stage ate which, and what it scored when.

A run that began with another's weights goes on behind the tokens those weights had eaten. A branch
has its parent's lines up to the step it left at in its own files, counted from the same beginning,
so it is laid over its parent and only what came after is its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foundling.report.curves import Bin, BinWidth, by_width
from foundling.report.read import Line, RunData, is_number, number

SHARE = "quiz"
CLOCKED = ("bpb", "loss", "full_bpb", "full_loss")


@dataclass(frozen=True)
class Stage:
    """One run's part of a life."""

    data: RunData
    offset: float
    """Tokens before this run's own count begins."""
    begin: float
    """Tokens of the whole life at which the run begins to count in it."""
    end: float
    """And at which it ends, or the next one takes over."""

    def own(self, tokens: float) -> bool:
        """Whether a place in the whole life is this stage's."""
        return self.begin < tokens <= self.end or (self.begin == 0 == tokens)

    def loss(self) -> list[tuple[float, float]]:
        """The training loss against the tokens of the whole life."""
        points = [(self.offset + x, y) for x, y in self.data.curve("loss")]
        return [(x, y) for x, y in points if self.own(x)]

    def loss_bins(self, width: BinWidth) -> list[Bin]:
        """The same in bins of that width; in steps, of those that the run counts itself."""
        if width.unit == "tokens":
            return by_width(self.loss(), width.size)
        steps = {self.offset + x: step - 1 for x, step in self.data.curve("step")}
        return by_width(self.loss(), width.size, steps)


def stages_of(lineage: Sequence[RunData]) -> list[Stage]:
    """The stages of a lineage, oldest first."""
    found: list[Stage] = []
    offset = begin = 0.0
    for place, data in enumerate(lineage):
        after = lineage[place + 1] if place + 1 < len(lineage) else None
        left = None if after is None else _parent_step(after)
        eaten = data.total_tokens if left is None else data.tokens_by(left)
        end = max(begin, offset + eaten)
        found.append(Stage(data, offset, begin, end))
        if after is not None and not _is_branch(after):
            offset = end
        begin = end
    return found


def _parent_step(data: RunData) -> int | None:
    stated = data.info.get("parent")
    step = stated.get("step") if isinstance(stated, Mapping) else None
    return int(step) if is_number(step) else None  # type: ignore[arg-type]


def _is_branch(data: RunData) -> bool:
    stated = data.info.get("parent")
    return isinstance(stated, Mapping) and stated.get("kind") == "branch"


@dataclass(frozen=True)
class Scored:
    """One score at one place of a life."""

    tokens: float
    value: float
    stderr: float


Series = dict[str, list[tuple[Stage, list[Scored]]]]
"""By score: each stage that has it, with its points in order."""


def score_series(stages: Sequence[Stage]) -> Series:
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
    """The few that everybody looks at first."""
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
