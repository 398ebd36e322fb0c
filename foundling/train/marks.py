"""What can be known about a device's work without standing beside it: when it had come so far, and
numbers that it sends."""

import time

import torch
from torch import Tensor


class Mark:
    """A moment of the device's own clock: when everything that it was told until now is done."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._time = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def since(self, other: "Mark") -> float:
        """Seconds from the other mark to this one; waits for both."""
        if self._event is None or other._event is None:
            return self._time - other._time
        other._event.synchronize()
        self._event.synchronize()
        return float(other._event.elapsed_time(self._event)) / 1e3


class Arriving:
    """Numbers on their way from the device, which goes on with what it is told meanwhile."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._event = numbers, None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(numbers.device))

    def read(self) -> list[float]:
        """Wait for them, and for nothing that came after."""
        if self._event is not None:
            self._event.synchronize()
        found: list[float] = self._numbers.tolist()
        return found
