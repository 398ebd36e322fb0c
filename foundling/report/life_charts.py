"""The whole life drawn: the loss in bins of any width, and every score, over all stages."""

from collections.abc import Sequence

from foundling.config import RunError
from foundling.report.chart import SMALL, WIDE, Boundary, Chart, Curve, colour_of, draw
from foundling.report.curves import BinWidth
from foundling.report.life import CLOCKED, Scored, Series, Stage, score_series, stages_of
from foundling.report.markup import Markup, join, tag
from foundling.report.numbers import compact
from foundling.report.read import RunData

SHOWN = 8
"""Scores in sight; the others are behind a fold."""
MOST_BINS = 5000
"""More would make a page that no browser likes."""
X_LABEL = "tokens of the whole life"


def whole_life(lineage: Sequence[RunData], widths: Sequence[BinWidth] = ()) -> Markup:
    """What a single run's chapter cannot show; nothing if there is nothing of the kind."""
    stages = stages_of(lineage)
    series = score_series(stages)
    further = [name for name in series if name not in CLOCKED]
    if len(stages) < 2 and not widths and not further:
        return Markup("")
    parts = [tag("h3", "The whole life")]
    if len(stages) > 1 or widths:
        parts += [draw(_loss(stages, width)) for width in widths or (None,)]
    parts.append(_scores(stages, series))
    return join(parts)


def _loss(stages: Sequence[Stage], width: BinWidth | None) -> Chart:
    lines = [(stage, stage.loss()) for stage in stages]
    total, told = stages[-1].end, ""
    if width:
        count = total if width.unit == "tokens" else sum(len(points) for _, points in lines)
        if count / width.size > MOST_BINS:
            raise RunError(
                f"--bins {width.size} cuts {compact(count)} {width.unit} into more than"
                f" {MOST_BINS:,} points; give a larger width."
            )
        told = f", each point the mean over {compact(width.size)} {width.unit}"
    return Chart(
        title=f"Training loss of every stage{told}",
        description=f"Training loss in nats per token over {compact(total)} tokens{told}."
        f" {_stages_told(stages)}",
        curves=[
            Curve(
                label=stage.data.name,
                points=points,
                colour=colour_of(place),
                bins=stage.loss_bins(width) if width else (),
            )
            for place, (stage, points) in enumerate(lines)
        ],
        boundaries=_boundaries(stages),
        y_label="nats per token",
        x_label=X_LABEL,
        y_format=lambda value: f"{value:.3g}",
        log=True,
        size=WIDE,
    )


def _scores(stages: Sequence[Stage], series: Series) -> Markup:
    charts = [draw(_score(stages, name, parts)) for name, parts in series.items()]
    if not charts:
        return Markup("")
    shown = [tag("div", *charts[:SHOWN], class_="charts")]
    if len(charts) > SHOWN:
        rest = tag("div", *charts[SHOWN:], class_="charts")
        shown.append(tag("details", tag("summary", f"{len(charts) - SHOWN} more scores"), rest))
    return join(shown)


def _score(
    stages: Sequence[Stage], name: str, parts: Sequence[tuple[Stage, Sequence[Scored]]]
) -> Chart:
    last = parts[-1][1][-1]
    error = f" \u00b1 {last.stderr:.3g}" if last.stderr else ""
    return Chart(
        title=name,
        description=f"{name} against {X_LABEL}: {last.value:.4g}{error} after"
        f" {compact(last.tokens)}. {_stages_told(stages)}",
        curves=[
            Curve(
                label=stage.data.name,
                points=[(point.tokens, point.value) for point in points],
                errors=[point.stderr for point in points],
                colour=colour_of(stages.index(stage)),
                marks=True,
            )
            for stage, points in parts
        ],
        boundaries=_boundaries(stages),
        y_label=name,
        x_label=X_LABEL,
        y_format=lambda value: f"{value:.3g}",
        size=SMALL,
    )


def _boundaries(stages: Sequence[Stage]) -> list[Boundary]:
    return [Boundary(label=stage.data.name, x=stage.begin) for stage in stages[1:]]


def _stages_told(stages: Sequence[Stage]) -> str:
    told = [f"{stage.data.name} from {compact(stage.begin)}" for stage in stages]
    return "Stages: " + ", ".join(told) + " tokens on."
