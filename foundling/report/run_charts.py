"""Charts of a run, and of all stages of a model's life."""

from collections.abc import Sequence
from typing import Any

from foundling.config.errors import RunError
from foundling.report.lineage import CLOCKED, LifeStage, Scored, Series, score_series, stages_of
from foundling.report.markup import (
    Format,
    Markup,
    compact,
    fixed,
    join,
    percent,
    plain,
    scientific,
    tag,
    three_digits,
)
from foundling.report.svg_chart import (
    WIDE,
    BinWidth,
    Chart,
    Curve,
    Level,
    colour_of,
    draw,
)
from foundling.runtime.run_reader import Points, RunData


def run_charts(data: RunData) -> Markup:
    """Every chart of a run, the loss first and largest."""
    small = [_bits(data), _rate(data), _norm(data), _speed(data), _update(data), _padding(data)]
    return tag(
        "div",
        draw(_loss(data)),
        tag("div", *(draw(chart) for chart in small if chart), class_="charts"),
    )


def _loss(data: RunData) -> Chart:
    train = data.curve("loss")
    levels = _floor(data, "floor_loss")
    description = _describe(train, "Training loss in nats per token", fixed(3))
    if levels:
        description += f" No model can do better than {levels[0].value:.3f} on the held-out text."
    return Chart(
        title="Loss",
        description=description,
        curves=[Curve(label="training", points=train), _held_out(data.eval_curve("loss"))],
        levels=levels,
        y_label="nats per token",
        y_format=three_digits,
        log=True,
        size=WIDE,
    )


def _bits(data: RunData) -> Chart | None:
    points = data.eval_curve("bpb")
    if not len(points):
        return None
    return Chart(
        title="Held-out bits per byte",
        description=_describe(points, "Bits per byte of held-out text", fixed(3)),
        curves=[_held_out(points)],
        levels=_floor(data, "floor_bpb"),
        y_label="bits per byte",
        y_format=three_digits,
        log=True,
    )


def _held_out(points: Points) -> Curve:
    return Curve(label="held out", points=points, colour="var(--b)", marks=True)


def _rate(data: RunData) -> Chart:
    return _of_steps(
        data.curve("lr"),
        ("Learning rate", "Learning rate", "learning rate", "learning rate"),
        scientific,
        from_zero=True,
    )


def _norm(data: RunData) -> Chart:
    points = data.curve("grad_norm")
    clip = data.config.optim.clip if data.config else 0.0
    reached = clip and points[:, 1].max(initial=0.0) >= clip / 2
    return _of_steps(
        points,
        ("Gradient norm, before clipping", "Global gradient norm", "norm", "norm"),
        plain,
        levels=[Level(label=f"clipped above {clip:g}", value=clip)] if reached else [],
        y_format=three_digits,
        log=True,
    )


def _speed(data: RunData) -> Chart:
    return _of_steps(
        data.curve("tokens_per_s"),
        ("Throughput", "Tokens per second", "tokens a second", "tokens per second"),
        compact,
        from_zero=True,
    )


def _update(data: RunData) -> Chart | None:
    points = data.curve("update_ratio")
    what = "Norm of the update over norm of the weights"
    words = ("Update to weight ratio", what, "ratio", "update / weights")
    return _of_steps(points, words, scientific, log=True) if len(points) else None


def _padding(data: RunData) -> Chart | None:
    points = data.curve("non_padding")
    if points[:, 1].min(initial=1.0) > 0.995:
        return None  # nothing is padded, so there is nothing to see
    what = "Share of positions that are not padding"
    words = ("Share of positions that hold text", what, "share", "share")
    return _of_steps(points, words, percent, y_format=lambda value: f"{100 * value:.3g}%")


def _of_steps(points: Points, words: tuple[str, str, str, str], show: Format, **more: Any) -> Chart:
    """A small chart of one curve; `words` are its title, what it shows, label and axis."""
    title, what, label, y_label = words
    return Chart(
        title=title,
        description=_describe(points, what, show),
        curves=[Curve(label=label, points=points)],
        y_label=y_label,
        **{"y_format": show, **more},
    )


def _floor(data: RunData, field: str) -> list[Level]:
    """The floor of the latest evaluation that knew one."""
    points = data.eval_curve(field)
    floor = float(points[-1, 1]) if len(points) else 0.0
    return [Level(label=f"floor {floor:.3f}", value=floor)] if floor else []


def _describe(points: Points, what: str, show: Format) -> str:
    """The curve in a sentence, for those who cannot see it."""
    if not len(points):
        return f"{what}; nothing was recorded."
    y = points[:, 1]
    return (
        f"{what} over {compact(points[-1, 0])} tokens: from {show(y[0])} to"
        f" {show(y[-1])}, least {show(y.min())}, greatest {show(y.max())}."
    )


# The whole life drawn: the loss in bins of any width, and every score, over all stages.

SHOWN = 8
"""Scores that are shown; the others are in a folded section."""
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
        parts += [draw(_loss_of_life(stages, width)) for width in widths or (None,)]
    parts.append(_scores(stages, series))
    return join(parts)


def _loss_of_life(stages: Sequence[LifeStage], width: BinWidth | None) -> Chart:
    lines = [(stage, stage.loss()) for stage in stages]
    total, binned = stages[-1].end, ""
    if width:
        count = total if width.unit == "tokens" else sum(len(points) for _, points in lines)
        if count / width.size > MOST_BINS:
            raise RunError(
                f"--bins {width.size} cuts {compact(count)} {width.unit} into more than"
                f" {MOST_BINS:,} points; give a larger width."
            )
        binned = f", each point the mean over {compact(width.size)} {width.unit}"
    return Chart(
        title=f"Training loss of every stage{binned}",
        description=f"Training loss in nats per token over {compact(total)} tokens{binned}."
        f" {_describe_stages(stages)}",
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
        y_format=three_digits,
        log=True,
        size=WIDE,
    )


def _scores(stages: Sequence[LifeStage], series: Series) -> Markup:
    charts = [draw(_score(stages, name, parts)) for name, parts in series.items()]
    if not charts:
        return Markup("")
    shown = [tag("div", *charts[:SHOWN], class_="charts")]
    if len(charts) > SHOWN:
        rest = tag("div", *charts[SHOWN:], class_="charts")
        shown.append(tag("details", tag("summary", f"{len(charts) - SHOWN} more scores"), rest))
    return join(shown)


def _score(
    stages: Sequence[LifeStage], name: str, parts: Sequence[tuple[LifeStage, Sequence[Scored]]]
) -> Chart:
    last = parts[-1][1][-1]
    error = f" \u00b1 {last.stderr:.3g}" if last.stderr else ""
    return Chart(
        title=name,
        description=f"{name} against {X_LABEL}: {last.value:.4g}{error} after"
        f" {compact(last.tokens)}. {_describe_stages(stages)}",
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
        y_format=three_digits,
    )


def _boundaries(stages: Sequence[LifeStage]) -> list[Level]:
    return [Level(label=stage.data.name, value=stage.begin) for stage in stages[1:]]


def _describe_stages(stages: Sequence[LifeStage]) -> str:
    names = [f"{stage.data.name} from {compact(stage.begin)}" for stage in stages]
    return "Stages: " + ", ".join(names) + " tokens on."
