"""Numbers as a person reads them: few digits, units, round ticks."""

import math
import sys
import time
from collections.abc import Callable

Format = Callable[[float], str]


def compact(value: float) -> str:
    """1234567 as 1.23M."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.4g}"


def plain(value: float) -> str:
    """Whole numbers with separators, others with four digits."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def scientific(value: float) -> str:
    """Learning rates: 0.003 as 3e-3."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def percent(share: float) -> str:
    """0.9834 as 98.3%."""
    return f"{100 * share:.1f}%"


def fixed(digits: int) -> Format:
    """A format with so many decimals."""
    return lambda value: f"{value:.{digits}f}"


def in_bytes(value: float) -> str:
    """1536000 as 1.54 MB."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.0f} B"


def duration(seconds: float) -> str:
    """4000 as 1 h 07 min."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def date(moment: float) -> str:
    """A time of day, to the minute, in the zone of whoever writes the report."""
    return time.strftime("%d %B %Y, %H:%M", time.localtime(moment)).lstrip("0")


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers that cover [low, high], at most `wanted` + 1 of them inside it."""
    if high <= low:
        return [low]
    rough = (high - low) / wanted
    if rough < sys.float_info.min:  # so near to each other that no round number is between
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between two positive ones, about evenly far apart on a log scale."""
    decades = math.log10(high / low)
    factors: tuple[float, ...] = (1, 2, 5)
    if decades < 1.3:
        factors = (1, 1.5, 2, 3, 5, 7)
    elif decades > 3:
        factors = (1,)
    every = math.ceil(decades / 8)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [f * 10.0**e for e in exponents if e % every == 0 for f in factors]
    return [value for value in found if low * 0.999 <= value <= high * 1.001]
