"""The charts of one run: loss against tokens with its floor, and what drove it."""

from foundling.report.chart import SMALL, WIDE, Chart, Curve, Level, draw
from foundling.report.markup import Markup, tag
from foundling.report.numbers import Format, compact, fixed, percent, plain, scientific
from foundling.report.read import Points, RunData


def run_charts(data: RunData) -> Markup:
    """Every chart of a run, the loss first and largest."""
    small = [_bits(data), _rate(data), _norm(data), _speed(data), _update(data), _padding(data)]
    return tag(
        "div",
        draw(_loss(data)),
        tag("div", *(draw(chart) for chart in small if chart), class_="charts"),
    )


def _loss(data: RunData) -> Chart:
    train, held_out = data.curve("loss"), data.eval_curve("loss")
    floor = _floor(data, "floor_loss")
    levels = [Level(label=f"floor {floor:.3f}", value=floor)] if floor else []
    told = _told(train, "Training loss in nats per token", fixed(3))
    if floor:
        told += f" No model can do better than {floor:.3f} on the held-out text."
    return Chart(
        title="Loss",
        description=told,
        curves=[
            Curve(label="training", points=train),
            Curve(label="held out", points=held_out, colour="var(--b)", marks=True),
        ],
        levels=levels,
        y_label="nats per token",
        y_format=lambda value: f"{value:.3g}",
        log=True,
        size=WIDE,
    )


def _bits(data: RunData) -> Chart | None:
    points = data.eval_curve("bpb")
    if not points:
        return None
    floor = _floor(data, "floor_bpb")
    return Chart(
        title="Held-out bits per byte",
        description=_told(points, "Bits per byte of held-out text", fixed(3)),
        curves=[Curve(label="held out", points=points, colour="var(--b)", marks=True)],
        levels=[Level(label=f"floor {floor:.3f}", value=floor)] if floor else [],
        y_label="bits per byte",
        y_format=lambda value: f"{value:.3g}",
        log=True,
        size=SMALL,
    )


def _rate(data: RunData) -> Chart:
    points = data.curve("lr")
    return Chart(
        title="Learning rate",
        description=_told(points, "Learning rate", scientific),
        curves=[Curve(label="learning rate", points=points)],
        y_label="learning rate",
        y_format=scientific,
        from_zero=True,
    )


def _norm(data: RunData) -> Chart:
    points = data.curve("grad_norm")
    clip = data.config.optim.clip if data.config else 0.0
    reached = clip and points and max(y for _, y in points) >= clip / 2
    return Chart(
        title="Gradient norm, before clipping",
        description=_told(points, "Global gradient norm", plain),
        curves=[Curve(label="norm", points=points)],
        levels=[Level(label=f"clipped above {clip:g}", value=clip)] if reached else [],
        y_label="norm",
        y_format=lambda value: f"{value:.3g}",
        log=True,
    )


def _speed(data: RunData) -> Chart:
    points = data.curve("tokens_per_s")
    return Chart(
        title="Throughput",
        description=_told(points, "Tokens per second", compact),
        curves=[Curve(label="tokens a second", points=points)],
        y_label="tokens per second",
        y_format=compact,
        from_zero=True,
    )


def _update(data: RunData) -> Chart | None:
    points = data.curve("update_ratio")
    if not points:
        return None
    return Chart(
        title="Update to weight ratio",
        description=_told(points, "Norm of the update over norm of the weights", scientific),
        curves=[Curve(label="ratio", points=points)],
        y_label="update / weights",
        y_format=scientific,
        log=True,
    )


def _padding(data: RunData) -> Chart | None:
    points = data.curve("non_padding")
    if not points or min(y for _, y in points) > 0.995:
        return None  # nothing is padded, so there is nothing to see
    return Chart(
        title="Share of positions that hold text",
        description=_told(points, "Share of positions that are not padding", percent),
        curves=[Curve(label="share", points=points)],
        y_label="share",
        y_format=lambda value: f"{100 * value:.3g}%",
    )


def _floor(data: RunData, field: str) -> float:
    """The floor of the latest evaluation that knew one; 0 if none did."""
    points = data.eval_curve(field)
    return points[-1][1] if points else 0.0


def _told(points: Points, what: str, show: Format) -> str:
    """The curve in a sentence, for those who cannot see it."""
    if not points:
        return f"{what}; nothing was recorded."
    lowest, highest = min(y for _, y in points), max(y for _, y in points)
    return (
        f"{what} over {compact(points[-1][0])} tokens: from {show(points[0][1])} to"
        f" {show(points[-1][1])}, least {show(lowest)}, greatest {show(highest)}."
    )
