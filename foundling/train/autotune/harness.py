"""Autotuning: tolerance against float64, timing of candidates, rates of matrix products."""

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foundling.plan.hardware import MatmulRate, find_gpu, name_of_device
from foundling.runtime.device import DeviceChoice, device_name, synchronise

TOLERANCE = 3e-2
"""Largest relative error, in norm: bf16 has 1e-2 of it."""


def worst_gap(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Norm of the difference over the norm of what is right, of the worst of several tensors."""
    pairs = zip(found, wanted, strict=True)
    wide = ((f.detach().double(), w.detach()) for f, w in pairs)
    return max(float((f - w).norm() / w.norm().clamp(min=1e-30)) for f, w in wide)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# (m, k, n): squares, then rows of a micro-batch times the matrices of models from 60M to 8B.
CUDA_MATMULS = (
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (16384, 384, 1408),
    (16384, 768, 2688),
    (16384, 1280, 5120),
    (16384, 2048, 512),
    (16384, 2048, 2048),
    (16384, 2048, 8192),
    (16384, 8192, 2048),
    (16384, 4096, 14336),
)
CPU_MATMULS = ((1024, 1024, 1024), (2048, 160, 448), (2048, 448, 160), (2048, 512, 1408))
IN_A_ROW_S, MOST_IN_A_ROW = 0.01, 64


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


def _matmul(
    device: torch.device, dtype: str, shape: tuple[int, int, int], seconds: float
) -> MatmulRate:
    m, k, n = shape
    left = torch.randn(m, k, device=device, dtype=DTYPES[dtype])
    right = torch.randn(k, n, device=device, dtype=DTYPES[dtype])
    # Several products a call, so that the clock's and the launch's microseconds do not count.
    repeats = max(1, round(2e11 / (2 * m * k * n))) if device.type == "cuda" else 1

    def work() -> None:
        for _ in range(repeats):
            torch.mm(left, right)

    took = median_seconds(work, device, seconds) / repeats
    return MatmulRate(dtype=dtype, m=m, k=k, n=n, flops_per_s=2 * m * k * n / took)


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
