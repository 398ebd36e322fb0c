"""A line chart as inline SVG: axes, bands, levels, and the numbers for the pointer to read.

Drawn here and not by a plotting library, so that the page is one small file with no network behind
it, takes its colours from the style sheet (dark ones too), and can be read by a screen reader.
"""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from foundling.report.markup import Format, Markup, compact, log_ticks, plain, tag, ticks

_Array = NDArray[np.float64]
Points = Sequence[tuple[float, float]] | _Array
"""x and y of each point; an array of shape (n, 2) where they are many."""

# Long curves made short without hiding their spikes.
#
# Points are put into bins of equal width along x; a bin keeps its mean, least and greatest value.
# The mean is drawn as a line and the range as a band, so one bad step in a million is still to be
# seen. Rejected: every n-th point (spikes vanish) and moving averages alone (they flatter).

MOST_BINS = 600
"""A bin is drawn as three points (mean, least, greatest): at most 1,800 of them a curve."""


@dataclass(frozen=True)
class Bin:
    """One place on a curve."""

    x: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class BinWidth:
    """How much of a curve a bin covers."""

    size: int
    unit: Literal["tokens", "steps"] = "tokens"


def binned(points: Points, most: int = MOST_BINS) -> list[Bin]:
    """At most `most` bins; a curve that is short enough keeps every point."""
    table = _table(points)
    if len(table) <= most:
        return [Bin(x, y, y, y) for x, y in table.tolist()]
    x = table[:, 0]
    width = (x[-1] - x[0]) / most or 1.0
    return _bins(table, np.minimum((x - x[0]) // width, most - 1))


def by_width(points: Points, width: float, places: _Array | None = None) -> list[Bin]:
    """Bins as wide as asked for, from 0 on, by x or by the place that `places` has for each point;
    empty ones are left out."""
    table = _table(points)
    return _bins(table, (table[:, 0] if places is None else places) // width)


def _table(points: Points) -> _Array:
    return np.asarray(points, dtype=np.float64).reshape(-1, 2)


def _bins(table: _Array, numbers: _Array) -> list[Bin]:
    """A bin of all points that have one number."""
    if not len(table):
        return []
    order = np.argsort(numbers, kind="stable")
    table, numbers = table[order], numbers[order]
    first = np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1]))
    # The mean of x too: the middle of a half-empty bin would move its points.
    means = np.add.reduceat(table, first) / np.diff(first, append=len(table))[:, None]
    low, high = (f.reduceat(table[:, 1], first) for f in (np.minimum, np.maximum))
    return [Bin(*bin) for bin in np.column_stack([means, low, high]).tolist()]


_IDS = itertools.count()
NARROW = 4.0
"""A line that is not as wide as this has a mark as well, or it could not be seen."""
LETTER = 7.0
"""Room for a letter of a label, and `ROW` for a row of them."""
ROW = 13


@dataclass(frozen=True)
class ChartSize:
    """Outer measures and margins in the units of the drawing."""

    width: int
    height: int
    bins: int
    left: int = 52
    right: int = 14
    top: int = 12
    bottom: int = 40


WIDE = ChartSize(1000, 360, bins=400)
SMALL = ChartSize(480, 230, bins=200, left=50)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line, or single marks for what is measured now and then."""

    label: str
    points: Points
    colour: str = "var(--a)"
    """Of the style sheet; see `colour_of`."""
    marks: bool = False
    errors: Sequence[float] = ()
    """Standard error of each point, drawn as a bar through its mark."""
    bins: Sequence[Bin] = ()
    """What is drawn instead of the points, where the width of a bin was asked for."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """A line with a name: a value to compare with, or a place where something else begins."""

    label: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What to draw."""

    title: str
    description: str
    """What a reader who cannot see the picture should know."""
    curves: Sequence[Curve]
    levels: Sequence[Level] = ()
    """Across."""
    boundaries: Sequence[Level] = ()
    """Upright."""
    y_label: str = ""
    x_label: str = "tokens"
    y_format: Format = plain
    log: bool = False
    from_zero: bool = False
    size: ChartSize = SMALL


@dataclass
class _Plane:
    """From values to places on the page."""

    size: ChartSize
    x: tuple[float, float]
    y: tuple[float, float]
    log: bool
    y_ticks: list[float] = field(default_factory=list)

    def px(self, x: float) -> float:
        size, (low, high) = self.size, self.x
        room = size.width - size.left - size.right
        return size.left + (x - low) / ((high - low) or 1.0) * room

    def py(self, y: float) -> float:
        size, (low, high) = self.size, self.y
        if self.log:
            y, low, high = (math.log(max(value, 1e-300)) for value in (y, low, high))
        room = size.height - size.top - size.bottom
        return size.top + (1 - (y - low) / ((high - low) or 1.0)) * room


def draw(chart: Chart) -> Markup:
    """The chart as a figure; one without a single point says so."""
    drawn = [(curve, _binned(chart, curve)) for curve in chart.curves]
    drawn = [(curve, bins) for curve, bins in drawn if bins]
    if not drawn:
        return tag(
            "figure",
            tag("figcaption", tag("h4", chart.title)),
            tag("p", "Nothing was recorded.", class_="empty"),
            class_="chart",
        )
    plane = _plane(chart, [bins for _, bins in drawn])
    name = f"chart{next(_IDS)}"
    size = chart.size
    svg = tag(
        "svg",
        tag("title", chart.title, id=f"{name}t"),
        tag("desc", chart.description, id=f"{name}d"),
        _axes(chart, plane),
        *_boundaries(plane, chart.boundaries),
        *(_band(plane, curve, bins) for curve, bins in drawn),
        *(_level(plane, level) for level in chart.levels),
        *(_line(plane, curve, bins) for curve, bins in drawn),
        tag("g", class_="cursor"),
        viewBox=f"0 0 {size.width} {size.height}",
        role="img",
        aria_labelledby=f"{name}t {name}d",
    )
    caption = tag("figcaption", tag("h4", chart.title), _legend(chart, drawn))
    return tag(
        "figure",
        caption,
        tag("div", svg, class_="plot"),
        _numbers(chart, plane, drawn),
        class_="chart wide" if size is WIDE else "chart",
    )


def colour_of(place: int) -> str:
    """A colour for each of any number of curves: the two of the style sheet, then hues that do not
    come again."""
    if place < 2:
        return ("var(--a)", "var(--b)")[place]
    return f"hsl({(265 + 222.5 * (place - 2)) % 360:g} 50% var(--lightness))"


def _binned(chart: Chart, curve: Curve) -> Sequence[Bin]:
    if curve.errors and len(curve.points) <= chart.size.bins:
        pairs = zip(curve.points, curve.errors, strict=True)
        return [Bin(x, y, y - error, y + error) for (x, y), error in pairs]
    return curve.bins or binned(curve.points, chart.size.bins)


def _boundaries(plane: _Plane, boundaries: Sequence[Level]) -> Iterator[Markup]:
    """Lines with their names, each in the first row where it covers no other."""
    size = plane.size
    left, right = float(size.left), float(size.width - size.right)
    rows: list[list[tuple[float, float]]] = []
    for boundary in boundaries:
        x, most = round(plane.px(boundary.value), 1), int((right - left) / 2 / LETTER)
        label = boundary.label
        label = label if len(label) <= most else label[: most - 1] + "\u2026"
        width = LETTER * len(label)
        at, anchor = (x + 4, "start") if x + 4 + width < right else (x - 4, "end")
        begin, end = (at, at + width) if anchor == "start" else (at - width, at)
        row = next(
            (n for n, row in enumerate(rows) if all(end < b or begin > e for b, e in row)),
            len(rows),
        )
        if row == len(rows):
            rows.append([])
        rows[row].append((begin, end))
        line = _stroke(x, size.top, x, size.height - size.bottom, "boundary")
        yield tag("g", line, _text(at, size.top + 10 + ROW * row, label, anchor, "label"))


def _plane(chart: Chart, bins: Sequence[Sequence[Bin]]) -> _Plane:
    every = [item for curve in bins for item in curve]
    values = [item.low for item in every] + [item.high for item in every]
    values += [level.value for level in chart.levels]
    low, high = min(values), max(values)
    log = chart.log and low > 1e-30 and high > 3 * low
    if log:
        low, high = low / 1.12, high * 1.06
        marks = log_ticks(low, high)
    else:
        low = min(low, 0.0) if chart.from_zero else low
        slack = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
        high += slack
        low -= 0.0 if low == 0 else slack
        marks = ticks(low, high, 5 if chart.size is WIDE else 4)
    across = (min(item.x for item in every), max(item.x for item in every))
    # A run is measured from its first token on.
    return _Plane(chart.size, (min(0.0, across[0]), across[1]), (low, high), log, marks)


def _axes(chart: Chart, plane: _Plane) -> Markup:
    size = plane.size
    bottom, right = size.height - size.bottom, size.width - size.right
    parts = []
    for value in plane.y_ticks:
        y = round(plane.py(value), 1)
        parts.append(_stroke(size.left, y, right, y, "grid"))
        parts.append(_text(size.left - 8, y + 4, chart.y_format(value), "end"))
    for value in ticks(*plane.x, wanted=6 if size is WIDE else 4):
        x = round(plane.px(value), 1)
        parts.append(_stroke(x, bottom, x, bottom + 4, "axis"))
        parts.append(_text(x, bottom + 18, compact(value), "middle"))
    parts.append(_stroke(size.left, bottom, right, bottom, "axis"))
    parts.append(_text(right, size.height - 5, chart.x_label, "end", "label"))
    scale = f"{chart.y_label}, log scale" if plane.log else chart.y_label
    parts.append(_text(size.left, size.height - 5, scale, "start", "label"))
    return tag("g", *parts)


def _stroke(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def _text(x: float, y: float, text: str, anchor: str, class_: str = "tick") -> Markup:
    return tag("text", text, x=round(x, 1), y=round(y, 1), text_anchor=anchor, class_=class_)


def _level(plane: _Plane, level: Level) -> Markup:
    y = round(plane.py(level.value), 1)
    return _stroke(plane.size.left, y, plane.size.width - plane.size.right, y, "level")


def _band(plane: _Plane, curve: Curve, bins: Sequence[Bin]) -> Markup:
    if curve.marks or all(item.low == item.high for item in bins):
        return Markup("")
    above = [(item.x, item.high) for item in bins]
    below = [(item.x, item.low) for item in reversed(bins)]
    return tag(
        "polygon", points=_places(plane, above + below), class_="band", style=f"--c:{curve.colour}"
    )


def _line(plane: _Plane, curve: Curve, bins: Sequence[Bin]) -> Markup:
    means = [(item.x, item.mean) for item in bins]
    style = f"--c:{curve.colour}"
    line = tag("polyline", points=_places(plane, means), class_="line", style=style)
    if not curve.marks and plane.px(means[-1][0]) - plane.px(means[0][0]) >= NARROW:
        return line
    dots = (
        tag("circle", cx=round(plane.px(x), 1), cy=round(plane.py(y), 1), r=3.2, class_="dot")
        for x, y in means
    )
    bars = (_error(plane, item) for item in bins if item.low < item.high)
    return tag("g", line, *bars, *dots, class_="marks", style=style)


def _error(plane: _Plane, item: Bin) -> Markup:
    x = round(plane.px(item.x), 1)
    return _stroke(x, round(plane.py(item.low), 1), x, round(plane.py(item.high), 1), "error")


def _places(plane: _Plane, points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{plane.px(x):.1f},{plane.py(y):.1f}" for x, y in points)


def _legend(chart: Chart, drawn: Sequence[tuple[Curve, Sequence[Bin]]]) -> Markup:
    if len(drawn) < 2 and not chart.levels:
        return Markup("")
    entries = [(curve.label, curve.colour, "key") for curve, _ in drawn]
    entries += [(level.label, "var(--level)", "key level") for level in chart.levels]
    items = (
        tag("li", tag("span", class_=kind, style=f"--c:{colour}"), label)
        for label, colour, kind in entries
    )
    return tag("ul", *items, class_="legend")


def _numbers(chart: Chart, plane: _Plane, drawn: Sequence[tuple[Curve, Sequence[Bin]]]) -> Markup:
    """What the pointer reads: for each curve its places on the page and the texts to show."""
    curves = [
        {
            "label": curve.label,
            "points": [
                [
                    round(plane.px(item.x), 1),
                    round(plane.py(item.mean), 1),
                    compact(item.x),
                    chart.y_format(item.mean),
                ]
                for item in bins
            ],
        }
        for curve, bins in drawn
    ]
    # "<" never appears, so no text can close the script element.
    data = json.dumps(curves, separators=(",", ":")).replace("<", "\\u003c")
    return tag("script", Markup(data), type="application/json")
