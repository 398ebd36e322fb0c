"""Measures this device's matrix-product rate: the ceiling that MFU is a share of.

A datasheet's peak says nothing about a CPU and flatters a throttled GPU, so the default ceiling is
the rate that a large product reaches here and now.
"""

import time

import torch


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Best rate of a square product in FLOP/s; a fraction of a second."""
    side = 4096 if device.type == "cuda" else 1024
    left = torch.randn(side, side, device=device, dtype=dtype)
    right = torch.randn(side, side, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(6):
        _synchronise(device)
        started = time.perf_counter()
        torch.mm(left, right)
        _synchronise(device)
        best = min(best, time.perf_counter() - started)
    return 2 * side**3 / best


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
