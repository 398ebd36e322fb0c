"""Mixture arithmetic: which source the i-th sample comes from, as a table of 65,536 slots.

Weights are rounded to 1/65,536 (largest remainders first) and the slots of each source are spread
evenly, so that after any number of samples each source's share is exact to one sample of its
rounded weight. Rejected: drawing the source at random per sample (shares drift by sqrt(n), and
seeking needs a replay).
"""

import heapq
from array import array
from collections.abc import Mapping
from functools import lru_cache
from math import gcd, lcm
from typing import Literal, Protocol, TypeVar

from foundling.config.errors import ConfigError

WeightsBy = Literal["rows", "tokens", "documents", "epochs"]

SLOTS = 65536
Key = TypeVar("Key", str, int)


def slot_counts(weights: Mapping[str, float]) -> dict[str, int]:
    """Round weights to whole slots that add up to SLOTS exactly."""
    bad = [name for name, weight in weights.items() if not 0 < weight < float("inf")]
    if bad or not weights:
        raise ConfigError(
            f"data.sources needs at least one source, each with a positive weight"
            f" ({', '.join(bad) or 'none given'})."
        )
    counts = apportion(weights, SLOTS)
    empty = [name for name, count in counts.items() if count == 0]
    if empty:
        raise ConfigError(
            f"data.sources gives {', '.join(empty)} less than 1/{SLOTS} of the mixture, which"
            " would never be read; raise its weight or remove it."
        )
    return counts


def apportion(weights: Mapping[Key, float], total: int) -> dict[Key, int]:
    """Whole numbers in proportion to the weights that add up to `total`, by largest remainders."""
    whole = sum(weights.values())
    exact = {name: weight / whole * total for name, weight in weights.items()}
    counts = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


class EpochSize(Protocol):
    """The size of one epoch of a source in units."""

    @property
    def units(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def documents(self) -> int: ...


def row_weights(
    weights: Mapping[str, float], by: WeightsBy, sizes: Mapping[str, EpochSize]
) -> dict[str, float]:
    """Weights by tokens, documents or epochs as weights by rows (units), which the slots share out.

    A row of a source holds tokens / units tokens and documents / units documents on average, and is
    1 / units of its epoch.
    """
    if by == "rows":
        return dict(weights)
    per_row = {
        name: {"tokens": size.tokens, "documents": size.documents, "epochs": 1}[by] / size.units
        for name, size in sizes.items()
    }
    return {name: weight / per_row[name] for name, weight in weights.items()}


def slot_table(counts: Mapping[str, int]) -> "array[int]":
    """Which source (by its place in `counts`) each slot belongs to, spread evenly.

    After any number of slots t, each source has had its share t * count / total to within less than
    one slot. Read again and again from the start it keeps that bound, because the shares are whole
    at the end.
    """
    values = tuple(counts.values())
    divisor = gcd(*values)
    return _spread(tuple(value // divisor for value in values)) * divisor


@lru_cache(maxsize=32)
def _spread(counts: tuple[int, ...]) -> "array[int]":
    """The chairman assignment (Tijdeman, Discrete Mathematics 32, 1980), in whole numbers.

    With k sources, rates r and e = 1 / (2k - 2), the j-th turn of a source may come at time t once
    r * t >= j - 1 + e; among the sources that may go, the one with the smallest (j - e) / r goes.
    No source is then off its share by more than 1 - e. Rejected: letting the source that is
    furthest below its share go first, which strays by more than a slot when there are many sources.
    """
    if len(counts) == 1:
        return array("H", [0])
    total, unit, common = sum(counts), 2 * len(counts) - 2, lcm(*counts)
    due: list[list[int]] = [[] for _ in range(total + 1)]
    for source, count in enumerate(counts):
        due[-(-total // (unit * count))].append(source)
    turns = [1] * len(counts)
    ready: list[tuple[int, int]] = []
    slots = array("H")
    for time in range(1, total + 1):
        for source in due[time]:
            deadline = (turns[source] * unit - 1) * (common // counts[source])
            heapq.heappush(ready, (deadline, source))
        _, source = heapq.heappop(ready)
        slots.append(source)
        earliest = -(-(turns[source] * unit + 1) * total // (unit * counts[source]))
        turns[source] += 1
        if turns[source] <= counts[source]:
            due[max(earliest, time + 1)].append(source)
    return slots
