"""How unusual a loss or a gradient norm is, against the steps before it.

The robust z-score: distance from the median in units of 1.4826 x the median absolute deviation,
which is the standard deviation where values are normal and does not move when a few are wild
(Iglewicz and Hoaglin 1993). Norms are compared by their logarithm, because they scatter by factors.
A value must also lie above the whole window: rows of a rare and difficult source come again and
again and are no spike. Rejected: mean and standard deviation, which the spike itself moves.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

NORMAL = 1.4826
"""Standard deviations of a normal distribution in one median absolute deviation."""
LEAST_SHARE = 0.01
"""Least spread of losses, as a share of their median: on a flat stretch a ripple is no spike."""
LEAST_LOG = 0.05
"""Least spread of logarithms: five per cent."""


def robust_z(
    value: float, window: Sequence[float], *, least: float = 0.0, least_share: float = 0.0
) -> float:
    """Spreads that `value` lies above the median of `window`; 0 where it is not above all of it.

    A spread is no smaller than `least`, nor than `least_share` of the median.
    """
    if not window or value <= max(window):
        return 0.0
    middle = median(window)
    spread = NORMAL * median(abs(past - middle) for past in window)
    return (value - middle) / max(spread, least, least_share * abs(middle), 1e-12)


class History:
    """Losses and gradient norms of the last steps that were taken, on one diet."""

    def __init__(
        self, size: int, pairs: Iterable[tuple[float, float]] = (), diet: str = ""
    ) -> None:
        self.size, self.diet = size, diet
        self._pairs: deque[tuple[float, float]] = deque(pairs, maxlen=size)

    def __len__(self) -> int:
        return len(self._pairs)

    def feed_on(self, diet: str) -> None:
        """Other data has other losses: what was seen on another diet says nothing about it."""
        if diet != self.diet:
            self.diet = diet
            self._pairs.clear()

    def add(self, loss: float, norm: float) -> None:
        """Remember a step that was taken."""
        self._pairs.append((loss, norm))

    def z(self, loss: float, norm: float) -> tuple[float, float]:
        """Robust z-scores of a loss and of a norm's logarithm; 0 while too few steps are known."""
        if len(self._pairs) < self.size // 2:
            return 0.0, 0.0
        losses, norms = zip(*self._pairs, strict=True)
        return (
            robust_z(loss, losses, least_share=LEAST_SHARE),
            robust_z(_log(norm), [_log(past) for past in norms], least=LEAST_LOG),
        )

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint keeps it; floats come back to the last bit."""
        return {"diet": self.diet, "pairs": [list(pair) for pair in self._pairs]}

    @classmethod
    def from_json(cls, size: int, data: Mapping[str, Any]) -> "History":
        """The inverse of to_json; a smaller window keeps the newest."""
        return cls(size, [(loss, norm) for loss, norm in data["pairs"]], data["diet"])


def _log(norm: float) -> float:
    return math.log(max(norm, 1e-30))
