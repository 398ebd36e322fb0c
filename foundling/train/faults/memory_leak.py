"""Warning of memory that rises step after step: a leak is reported hours before it ends the run.

What is looked at: the process's own resident memory (without mapped files: reading a data set fills
the page cache, which is no leak) and what CUDA tensors take. A rise is steady when each quarter of
the samples lies above the one before; its slope is the median of all pairs' slopes (Theil 1950, Sen
1968), which a peak here and there does not move.
"""

import resource
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median

import torch

from foundling.runtime.device import proc_bytes

MEMORY_INTERVAL = 10
"""Steps between samples."""
SAMPLES = 64
LEAST_RISE = 64 << 20
LEAST_SHARE = 0.03
MiB, GiB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Rise:
    """Memory that rises steadily."""

    what: str
    first_step: int
    last_step: int
    first: float
    last: float
    per_step: float

    def describe(self, room: int = 0) -> str:
        """In words; with the size of the memory, when it will be full."""
        sentence = (
            f"{self.what} has risen steadily from {self.first / GiB:.2f} to"
            f" {self.last / GiB:.2f} GiB between steps {self.first_step} and {self.last_step},"
            f" {self.per_step / MiB:.2f} MiB a step"
        )
        if room > self.last:
            full = self.last_step + (room - self.last) / self.per_step
            return f"{sentence}; at this pace its {room / GiB:.1f} GiB are full at step {full:.0f}."
        return f"{sentence}; something is kept that should be let go."


class MemoryTrend:
    """Measures memory every few steps, and reports each rise once."""

    def __init__(self, device: torch.device) -> None:
        self._gauges = gauges_of(device)
        self._samples: dict[str, deque[tuple[int, int]]] = {
            name: deque(maxlen=SAMPLES) for name in self._gauges
        }

    def measure(self, step: int) -> list[str]:
        """Sentences about memory that has risen; mostly none."""
        if step % MEMORY_INTERVAL:
            return []
        sentences = []
        for name, samples in list(self._samples.items()):
            read, room = self._gauges[name]
            while samples and samples[-1][0] >= step:  # the run went back
                samples.pop()
            samples.append((step, read()))
            rise = find_rise(name, list(samples)) if len(samples) == SAMPLES else None
            if rise is not None:
                sentences.append(rise.describe(room))
                del self._samples[name]  # once
        return sentences


def find_rise(what: str, samples: list[tuple[int, int]]) -> Rise | None:
    """A steady rise in (step, bytes), or None."""
    values = [value for _, value in samples]
    quarter = len(values) // 4
    levels = [median(values[n * quarter : (n + 1) * quarter]) for n in range(4)]
    rise = levels[-1] - levels[0]
    if rise < max(LEAST_RISE, LEAST_SHARE * levels[0]):
        return None
    if any(after - before < rise / 10 for before, after in pairwise(levels)):
        return None  # it jumped once, or goes up and down
    slope = median((b - a) / (t - s) for (s, a), (t, b) in combinations(samples, 2))
    if slope <= 0:
        return None
    return Rise(what, samples[0][0], samples[-1][0], levels[0], levels[-1], slope)


def gauges_of(device: torch.device) -> dict[str, tuple[Callable[[], int], int]]:
    """What can be read on this machine: how to read bytes in use, and how many there are (0:
    unknown)."""
    found: dict[str, tuple[Callable[[], int], int]] = {
        "the process's memory": (own_memory, proc_bytes("meminfo", "MemTotal"))
    }
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory
        found["CUDA memory"] = (lambda: torch.cuda.memory_allocated(device), room)
    return found


def own_memory() -> int:
    """Resident anonymous memory of this process, in bytes."""
    if resident := proc_bytes("self/status", "RssAnon"):
        return resident
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
