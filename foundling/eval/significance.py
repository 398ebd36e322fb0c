"""How likely a difference is by chance alone, and how far off it may be.

If two models are equally good, then on each example it is a matter of chance which of them got
which score: exchanging the two changes nothing but the sign of that example's difference. So the
p-value is the share of all sign patterns whose sum is at least as far from zero as the one that was
seen. That is a bootstrap under the null hypothesis, holds for any distribution of scores and any
number of examples, and for right and wrong it is McNemar's test.

Patterns exactly as far count half (the mid-p-value, Lancaster 1961): right and wrong leave few
distinct sums, and counting them whole makes p < 0.05 rarer than one in twenty among equals, which
wastes the examples. Rejected: the percentile bootstrap for p, whose resamples are not made under
the null hypothesis, and a t-test, which is not made for differences that are mostly zero.

The interval is the paired bootstrap's: examples are drawn again with replacement, both models'
scores together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DRAWS = 20_000
"""Sign patterns where there are too many to try all: p = 0.05 is then exact to 0.0015."""
RESAMPLES = 4000
ALL_PATTERNS = 14
"""Up to so many differences every pattern is tried."""
MANY = 4000
"""From so many different values on, sums are as good as normal."""
ALPHA, POWER = 0.05, 0.8
_NORMAL = NormalDist()
SEEN = _NORMAL.inv_cdf(1 - ALPHA / 2) + _NORMAL.inv_cdf(POWER)
"""Standard errors that a difference must have to be seen: four times of five at p < 0.05."""


@dataclass(frozen=True)
class PairedScores:
    """Scores of two models on the same examples."""

    a: Floats
    b: Floats
    weight: Floats

    @property
    def n(self) -> int:
        return len(self.a)

    @cached_property
    def shares(self) -> Floats:
        """Each example's part of the mean."""
        shares: Floats = self.weight / self.weight.sum()
        return shares

    @cached_property
    def parts(self) -> Floats:
        """What each example adds to the difference."""
        return self.shares * (self.b - self.a)

    @property
    def mean_a(self) -> float:
        return float((self.shares * self.a).sum())

    @property
    def mean_b(self) -> float:
        return float((self.shares * self.b).sum())

    @property
    def difference(self) -> float:
        """B's mean less A's; exactly zero where as many went one way as the other."""
        return math.fsum(self.parts)

    @property
    def stderr(self) -> float:
        """Standard error of the difference; of one example nothing is known."""
        if self.n < 2:
            return math.nan
        away = self.shares * (self.b - self.a - self.difference)
        return float(math.sqrt((away**2).sum() * self.n / (self.n - 1)))

    def clean(self, keep: NDArray[np.bool_]) -> "PairedScores":
        """Some of the examples."""
        return PairedScores(self.a[keep], self.b[keep], self.weight[keep])


def p_value(parts: Floats) -> float:
    """How often a random pattern of signs gives a sum at least as far from zero (mid-p)."""
    sizes, counts = np.unique(_rounded(np.abs(parts[parts != 0])), return_counts=True)
    if not len(sizes):
        return 1.0
    seen = abs(float(parts.sum()))
    if len(sizes) == 1:
        return _binomial_p(int(counts[0]), seen / float(sizes[0]))
    number = int(counts.sum())
    if len(sizes) > MANY:
        return math.erfc(seen / math.sqrt(2 * float((parts**2).sum())))
    if number <= ALL_PATTERNS:
        return _tail(_every_sum(np.repeat(sizes, counts)), seen)
    sums = _random_sums(sizes, counts)
    # The pattern that was seen is one of them: without it p could be zero.
    return _tail(np.append(sums, seen), seen)


def _rounded(sizes: Floats) -> Floats:
    """Equal but for the last bits is equal: a share times one is not always the share."""
    if not len(sizes):
        return sizes
    digits = 12 - math.ceil(math.log10(float(sizes.max())))
    return np.round(sizes, digits)


def _tail(sums: Floats, seen: float) -> float:
    far, slack = np.abs(sums), 1e-9 * max(seen, 1e-300)
    beyond, level = (far > seen + slack).sum(), (np.abs(far - seen) <= slack).sum()
    return float((beyond + level / 2) / len(sums))


def _binomial_p(number: int, seen: float) -> float:
    """The same for differences of one size, exactly: the signs' sum is 2 x Binomial - number."""
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, number + 1)))])
    chances = np.exp(logs[-1] - logs - logs[::-1] - number * math.log(2))
    far = np.abs(2 * np.arange(number + 1) - number)
    place = round(seen)
    return float(min(1.0, chances[far > place].sum() + chances[far == place].sum() / 2))


def _every_sum(sizes: Floats) -> Floats:
    sums = np.zeros(1)
    for size in sizes:
        sums = np.concatenate([sums + size, sums - size])
    return sums


def _random_sums(sizes: Floats, counts: NDArray[np.int64]) -> Floats:
    """Sums under random signs; always the same ones, so that a comparison can be repeated."""
    rng = np.random.default_rng(0)
    sums = np.zeros(DRAWS)
    repeated = counts > 1
    for size, count in zip(sizes[repeated], counts[repeated], strict=True):
        sums += size * (2.0 * rng.binomial(count, 0.5, DRAWS) - count)
    single = sizes[~repeated]
    for start in range(0, len(single), 512):
        some = single[start : start + 512]
        signs = 2.0 * rng.integers(0, 2, (DRAWS, len(some)), dtype=np.int8) - 1.0
        sums += signs @ some
    return sums


def interval(groups: Sequence[PairedScores]) -> tuple[float, float]:
    """95% interval of the mean difference over the groups, each drawn again by itself."""
    if any(pairs.n < 2 for pairs in groups):
        return math.nan, math.nan
    total = sum(_resampled(pairs, number) for number, pairs in enumerate(groups)) / len(groups)
    tail = _small_sample_tail(min(pairs.n for pairs in groups))
    low, high = np.quantile(np.asarray(total), [tail, 1 - tail])
    return float(low), float(high)


def _resampled(pairs: PairedScores, number: int) -> Floats:
    """Differences of as many examples, drawn with replacement."""
    rng = np.random.default_rng([1, number])
    rows, counts = np.unique(
        np.stack([pairs.b - pairs.a, pairs.weight], 1), axis=0, return_counts=True
    )
    if len(rows) > MANY:
        return rng.normal(pairs.difference, pairs.stderr, RESAMPLES)
    found = np.empty(RESAMPLES)
    for start in range(0, RESAMPLES, 250):
        drawn = rng.multinomial(pairs.n, counts / pairs.n, 250)
        weights = drawn * rows[:, 1]
        found[start : start + 250] = (weights @ rows[:, 0]) / weights.sum(1)
    return found


def _small_sample_tail(n: int) -> float:
    """The quantile to take so that few examples do not make the interval too narrow (Hesterberg
    2015): what the normal distribution has beyond the t-quantile of n - 1 degrees."""
    z = _NORMAL.inv_cdf(1 - ALPHA / 2)
    t = z + (z**3 + z) / (4 * (n - 1)) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * (n - 1) ** 2)
    return _NORMAL.cdf(-t * math.sqrt(n / (n - 1)))


def times_as_many(difference: float, stderr: float) -> float | None:
    """How many times as many examples would show a difference of this size; None if none would."""
    if not math.isfinite(stderr) or abs(difference) <= 1e-9 * stderr:  # zero, but for rounding
        return None
    return (SEEN * stderr / abs(difference)) ** 2


def holm(values: Sequence[float]) -> list[float]:
    """P-values that hold for all comparisons together (Holm 1979)."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    adjusted, least = [1.0] * len(values), 0.0
    for rank, place in enumerate(order):
        least = max(least, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = least
    return adjusted


@dataclass(frozen=True)
class Seeds:
    """What several runs a side say about the recipe, not only about these weights."""

    difference: float
    p: float
    sd: float
    """Of a run's score around its side's mean."""
    needed: int | None
    """Runs a side that would show this difference."""


def over_seeds(a: Sequence[float], b: Sequence[float]) -> Seeds | None:
    """Welch's test of the runs' scores; None unless both sides have two runs or more."""
    if min(len(a), len(b)) < 2:
        return None
    gap = float(np.mean(b) - np.mean(a))
    variances = [float(np.var(side, ddof=1)) for side in (a, b)]
    errors = [variance / len(side) for variance, side in zip(variances, (a, b), strict=True)]
    sd = math.sqrt(sum(variances) / 2)
    needed = None
    if gap:  # the last term: t-quantiles are larger than the normal's (Guenther 1981)
        needed = max(2, math.ceil(2 * (SEEN * sd / gap) ** 2 + 1))
    if not sum(errors):
        return Seeds(gap, 0.0 if gap else 1.0, sd, needed)
    below = sum(e**2 / (len(side) - 1) for e, side in zip(errors, (a, b), strict=True))
    degrees = sum(errors) ** 2 / below
    return Seeds(gap, t_tails(gap / math.sqrt(sum(errors)), degrees), sd, needed)


def t_tails(t: float, degrees: float) -> float:
    """Probability beyond +-t of Student's distribution: with x = sqrt(degrees) tan(angle) its
    density is cos(angle)^(degrees - 1)."""
    angles = np.linspace(0.0, math.pi / 2, 20_001)
    density = np.cos(angles) ** (degrees - 1)
    steps = (density[1:] + density[:-1]) / 2
    within = np.concatenate([[0.0], np.cumsum(steps)])
    inside = np.interp(math.atan(abs(t) / math.sqrt(degrees)), angles, within)
    return float(1 - inside / within[-1])
