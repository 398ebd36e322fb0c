"""Long curves made short without hiding their spikes.

Points are put into bins of equal width along x; a bin keeps its mean, least and greatest value. The
mean is drawn as a line and the range as a band, so one bad step in a million is still to be seen.
Rejected: every n-th point (spikes vanish) and moving averages alone (they flatter).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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


def binned(points: Sequence[tuple[float, float]], most: int = MOST_BINS) -> list[Bin]:
    """At most `most` bins; a curve that is short enough keeps every point."""
    if len(points) <= most:
        return [Bin(x, y, y, y) for x, y in points]
    first, last = points[0][0], points[-1][0]
    width = (last - first) / most or 1.0
    groups: dict[int, list[tuple[float, float]]] = {}
    for x, y in points:
        groups.setdefault(min(int((x - first) / width), most - 1), []).append((x, y))
    return [_bin(group) for _, group in sorted(groups.items())]


def by_width(
    points: Sequence[tuple[float, float]],
    width: float,
    places: Mapping[float, float] | None = None,
) -> list[Bin]:
    """Bins as wide as asked for, from 0 on, by x or by what `places` has for it; empty ones are
    left out."""
    groups: dict[int, list[tuple[float, float]]] = {}
    for x, y in points:
        groups.setdefault(int((places[x] if places else x) // width), []).append((x, y))
    return [_bin(group) for _, group in sorted(groups.items())]


def _bin(group: Sequence[tuple[float, float]]) -> Bin:
    ys = [y for _, y in group]
    # The mean of x too: the middle of a half-empty bin would move its points.
    return Bin(_mean(x for x, _ in group), _mean(ys), min(ys), max(ys))


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
