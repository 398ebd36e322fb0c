"""Autotuning harness: candidates are checked against float64, timed, and one is picked with a
reason."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foundling.plan.hardware import find_gpu, name_of_device
from foundling.runtime.console import first_line
from foundling.runtime.device import DeviceChoice, device_name, synchronise

MAX_KERNEL_ERROR = 3e-2
"""Largest relative error, in norm: bf16 has 1e-2 of it."""
TIMING_S = 0.02
"""Seconds of timing per candidate; three calls at least."""
IN_A_ROW_S, MOST_IN_A_ROW = 0.01, 64


@dataclass(frozen=True)
class Candidate:
    """One way to compute something, after it was tried at the run's shapes."""

    name: str
    seconds: float = 0.0
    """Forward and backward; 0 where nothing was timed."""
    refusal: str = ""
    """Why it cannot be used."""


def try_candidate(name: str, error: Callable[[], float], seconds: Callable[[], float]) -> Candidate:
    """Check a candidate against float64 and time it; whatever it throws is why it cannot be
    used."""
    try:
        if not (gap := error()) <= MAX_KERNEL_ERROR:
            return Candidate(name, refusal=f"wrong by {gap:.1e} of the norm")
        return Candidate(name, seconds())
    except Exception as failure:  # whatever a kernel that does not fit throws
        return Candidate(name, refusal=first_line(failure))


def pick(tried: Sequence[Candidate]) -> tuple[list[Candidate], str]:
    """The candidates that work, the best first, and why: the fastest, or in a deterministic run the
    first as listed."""
    working = [candidate for candidate in tried if not candidate.refusal]
    if torch.are_deterministic_algorithms_enabled():
        return working, "the first that works; deterministic runs are not chosen by a clock"
    working.sort(key=lambda candidate: candidate.seconds)
    times = ", ".join(f"{one.name} {1e3 * one.seconds:.2f} ms" for one in working)
    return working, f"launched: {times}"


def pairs_with_float64(
    function: Callable[..., Tensor], exact: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """The result and the gradients of `inputs`, each beside what `exact` makes of the same inputs
    in float64."""
    out = function(*inputs)
    seed = torch.randn_like(out) if out.ndim else torch.ones_like(out)
    found = [out.detach(), *torch.autograd.grad(out, inputs, seed)]
    wide = [part.detach().double().requires_grad_() for part in inputs]
    right = exact(*wide)
    wanted = [right.detach(), *torch.autograd.grad(right, wide, seed.double())]
    return list(zip(found, wanted, strict=True))


def max_relative_error(
    function: Callable[..., Tensor], exact: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> float:
    """Largest relative error, in norm, of result and gradients against float64."""
    pairs = pairs_with_float64(function, exact, inputs)
    return max(float((f.double() - w).norm() / w.norm().clamp(min=1e-30)) for f, w in pairs)


def median_seconds(
    work: Callable[[], object], device: torch.device, seconds: float, *, at_least: float = 0.0
) -> float:
    """Median seconds of one call, over about `seconds` of calls after two that warm up. Calls that
    take less than `at_least` are made in a row of about so long: the device works on one while
    Python launches the next, as in a step that the host is ahead of."""
    for _ in range(2):
        work()
    synchronise(device)
    times: list[float] = []
    in_a_row = 1
    begun = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - begun < seconds and len(times) < 200):
        started = time.perf_counter()
        for _ in range(in_a_row):
            work()
        synchronise(device)
        times.append((time.perf_counter() - started) / in_a_row)
        if in_a_row == 1 and times[-1] < at_least:
            in_a_row = min(math.ceil(at_least / times[-1]), MOST_IN_A_ROW)
            times.clear()
    return sorted(times)[len(times) // 2]


def candidate_seconds(
    work: Callable[[], object], device: torch.device, *, at_least: float = 0.0
) -> float:
    """Median seconds of one call of a candidate. A deterministic run makes one call, for 0 seconds:
    a clock would let two equal runs differ."""
    if torch.are_deterministic_algorithms_enabled():
        work()
        synchronise(device)
        return 0.0
    return median_seconds(work, device, TIMING_S, at_least=at_least)


def sheet_peak(choice: DeviceChoice) -> tuple[float, str] | None:
    """What MFU is a share of: the dense peak of the arithmetic (float8 is held to bf16's) in FLOP/s
    on the device's data sheet, and which that is; None where the table has no sheet of it."""
    name = name_of_device(device_name(choice.device))
    gpu = find_gpu(name) if name else None
    if gpu is None or not gpu.has_sheet:
        return None
    # A GPU without tf32 makes such products in fp32.
    kind = "fp32" if choice.name == "tf32" and "tf32" not in gpu.peaks else choice.name
    return (
        (gpu.peaks[kind], f"{name}, dense {kind} of its data sheet") if kind in gpu.peaks else None
    )


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Best rate of a square product in FLOP/s, in a fraction of a second: what `matmul_share` is a
    share of. A data sheet says nothing about a CPU and flatters a throttled GPU."""
    side = 4096 if device.type == "cuda" else 1024
    left = torch.randn(side, side, device=device, dtype=dtype)
    right = torch.randn(side, side, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(6):
        synchronise(device)
        started = time.perf_counter()
        torch.mm(left, right)
        synchronise(device)
        best = min(best, time.perf_counter() - started)
    return 2 * side**3 / best
