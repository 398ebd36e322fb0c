"""The batch size that is fastest: doubled until it is slower or does not fit, then refined.

Speed over batch size has one hump in practice (kernels fill up, then memory gets tight), so a climb
finds it; its strides end at FINEST rows: docs/performance.md has the 1.24B model's figures at 44.
"""

from collections.abc import Callable, Mapping

STEP, FINEST = 8, 4
WORSE = 0.98
"""Of the best so far: a doubling below it ends the search upwards."""
Measure = Callable[[int], float | None]
"""Rows to tokens a second; None where they do not fit."""


def best_batch(measure: Measure, most: int = 1024) -> dict[int, float | None]:
    """Every size that was tried and its speed; the fastest is `fastest(found)`."""
    found: dict[int, float | None] = {}

    def speed(rows: int) -> float:
        if rows not in found:
            found[rows] = measure(rows)
        return found[rows] or 0.0

    rows, top = STEP, 0.0
    while rows <= most:
        now = speed(rows)
        if not now or now < WORSE * top:
            break
        top, rows = max(top, now), 2 * rows
    rows = STEP // 2
    while not any(found.values()) and rows >= 1:  # not even eight fit
        speed(rows)
        rows //= 2
    if (best := fastest(found)) >= STEP:
        _climb(speed, best, max(found))
    return found


def _climb(speed: Callable[[int], float], best: int, limit: int) -> None:
    """Go by smaller and smaller strides to where no neighbour is faster."""
    stride = best // 2 // FINEST * FINEST
    while stride >= FINEST:
        for rows in (best + stride, best - stride):
            if STEP <= rows <= limit and speed(rows) > speed(best):
                best = rows
                break
        stride = stride // 2 // FINEST * FINEST


def largest_batch(
    peak: Callable[[int], int | None],
    *,
    most: int,
    room: int = 0,
    known: Mapping[int, int | None] | None = None,
) -> int:
    """The largest size that fits, to the row; 0 where none does.

    `peak` takes a step of so many rows and gives its bytes, or None if it does not fit. Bytes grow
    in a straight line with rows, so two sizes that fit foretell where `room` ends, and a try or two
    around that place settles it; where the line deceives, the interval is halved.
    """
    found = dict(known or {})
    while True:
        fits = {rows: held for rows, held in found.items() if held is not None}
        low = max(fits, default=0)
        high = min((rows for rows in found if rows > low and rows not in fits), default=most + 1)
        if high - low <= 1:
            return low
        rows = _foretold(fits, room) if len(fits) > 1 and room else 2 * low or 1
        if rows <= low:  # the end is foretold here: see whether one more fits
            rows = low + 1
        elif rows >= high:
            rows = (low + high) // 2
        found[rows] = peak(rows)


def _foretold(fits: Mapping[int, int], room: int) -> int:
    """Where the line through the smallest and the largest size meets the end of the memory."""
    few, many = min(fits), max(fits)
    slope = (fits[many] - fits[few]) / (many - few)
    return many + int((room - fits[many]) / slope) if slope > 0 else 2 * many


def fastest(found: dict[int, float | None]) -> int:
    """The size with the best speed; 0 where none fits."""
    fitting = {rows: speed for rows, speed in found.items() if speed}
    return max(fitting, key=lambda rows: fitting[rows]) if fitting else 0
