"""Memory that rises steadily is told once; what jumps, or goes up and down, is not."""

import random

import pytest
import torch

from foundling.train.faults import memory_leak
from foundling.train.faults.memory_leak import (
    SAMPLES,
    MemoryTrend,
    MiB,
    find_rise,
    gauges_of,
    own_memory,
)

BASE = 4000 * MiB


def looks(values: list[float]) -> list[tuple[int, int]]:
    return [(10 * (n + 1), int(value)) for n, value in enumerate(values)]


def noisy(slope: float, noise: float) -> list[float]:
    rng = random.Random(1)
    return [BASE + slope * n + rng.gauss(0, noise) for n in range(SAMPLES)]


def test_a_leak_is_found_with_its_slope() -> None:
    rise = find_rise("it", looks(noisy(5 * MiB, 20 * MiB)))
    assert rise is not None
    assert rise.per_step == pytest.approx(0.5 * MiB, rel=0.05)
    assert (
        "0.50 MiB a step" in rise.describe()
        or "0.49" in rise.describe()
        or "0.51" in rise.describe()
    )


def test_peaks_on_the_way_do_not_hide_it() -> None:
    values = noisy(5 * MiB, 5 * MiB)
    for place in range(3, SAMPLES, 9):
        values[place] += 3000 * MiB
    rise = find_rise("it", looks(values))
    assert rise is not None
    assert rise.per_step == pytest.approx(0.5 * MiB, rel=0.2)


@pytest.mark.parametrize(
    "values",
    [
        noisy(0, 100 * MiB),
        noisy(-5 * MiB, 5 * MiB),
        noisy(0.5 * MiB, 1 * MiB),  # 32 MiB in 640 steps
        [BASE + (800 * MiB if n > 20 else 0) for n in range(SAMPLES)],
        [BASE + (800 * MiB if n < 10 else 0) for n in range(SAMPLES)],
        [BASE + 600 * MiB * (n % 16) / 16 for n in range(SAMPLES)],
        [BASE + min(n, 20) * 40 * MiB for n in range(SAMPLES)],  # warms up and stays
    ],
    ids=["noise", "falling", "small", "jump", "drop", "sawtooth", "plateau"],
)
def test_what_is_no_leak_is_not_told(values: list[float]) -> None:
    assert find_rise("it", looks(values)) is None


def test_it_is_told_once_and_says_when_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    step = 0
    gauges = {"it": (lambda: BASE + step * MiB, 8000 * MiB)}
    monkeypatch.setattr(memory_leak, "gauges_of", lambda _: gauges)
    trend = MemoryTrend(torch.device("cpu"))
    told = []
    for step in range(1, 2001):
        told += trend.measure(step)
    assert len(told) == 1
    assert "between steps 10 and 640" in told[0]
    assert "full at step 40" in told[0] or "full at step 39" in told[0]


def test_a_run_that_went_back_looks_at_the_same_step_again(monkeypatch: pytest.MonkeyPatch) -> None:
    held = iter(range(BASE, BASE + 1000 * SAMPLES * MiB, 5 * MiB))
    monkeypatch.setattr(memory_leak, "gauges_of", lambda _: {"it": (lambda: next(held), 0)})
    trend = MemoryTrend(torch.device("cpu"))
    told = []
    for step in (10, 20, 10, 20, *range(30, 10 * SAMPLES + 10, 10)):
        told += trend.measure(step)
    assert len(told) == 1


def test_own_memory_grows_by_what_is_taken() -> None:
    before = own_memory()
    taken = bytearray(200 * MiB)
    taken[::4096] = b"x" * len(taken[::4096])
    assert own_memory() - before > 190 * MiB
    assert set(gauges_of(torch.device("cpu"))) == {"the process's memory"}
