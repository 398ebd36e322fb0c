"""Steps that the device has been told to take and whose numbers nobody has looked at yet.

A look at a number waits for the device, and meanwhile nobody tells it what to do next: it runs dry
for as long as it takes to launch an update and the beginning of a step. So the numbers of one step
are read when the next one has begun. What is saved or scored is a step that the guard has passed,
though, and so is what is told.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from foundling.train.marks import Mark
from foundling.train.step import StepResult, Taken


@dataclass(frozen=True, kw_only=True)
class Done:
    """A step that the guard has passed, and what it took."""

    result: StepResult
    lr: float
    step_s: float
    wait_s: float


class Behind:
    """At most one step while another is under way."""

    def __init__(self, device: torch.device, *, can_go_back: bool = False) -> None:
        self._device = device
        self._steps: deque[tuple[Taken, float, float]] = deque()
        self.can_go_back = can_go_back
        """Whether there is a checkpoint, from which a spike can be undone that was taken."""
        self.begin()

    def begin(self) -> None:
        """Steps begin, or go on after other work; those before them are done or given up."""
        self._steps.clear()
        self._since, self._mark = time.perf_counter(), Mark(self._device)

    def add(self, taken: Taken, lr: float, wait_s: float) -> None:
        """One more is under way."""
        self._steps.append((taken, lr, wait_s))

    def settle(self, *, leave: int) -> Iterator[Done]:
        """Look at all but the last `leave`. Raises RefusedStepError, with the state's counters as
        they were before the step that the guard refuses."""
        while len(self._steps) > leave:
            taken, lr, wait_s = self._steps.popleft()
            result = taken.result()
            yield Done(result=result, lr=lr, step_s=self._seconds(taken), wait_s=wait_s)

    def _seconds(self, taken: Taken) -> float:
        """From the end of the step before, or the beginning: by the device's clock where nobody
        stood beside it, because there the host's tells when it looked."""
        now, last = time.perf_counter(), self._since
        self._since = now
        if taken.end is None:
            return now - last
        seconds = taken.end.since(self._mark)
        self._mark = taken.end
        return seconds
