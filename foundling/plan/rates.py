"""How fast one kernel runs on a GPU: the roofline (Williams et al. 2009) with a curve for shapes.

A product of m x k with k x n reaches peak x share x s(m) s(n) s(k), s(x) = x / (x + half): tiles,
waves and the main loop each lose a constant amount that long sides make up for. Where the device
was measured, the curve is bent towards the measured shapes, the nearest counting most.
"""

import math

from foundling.plan.coefficients import COEFFICIENTS as K
from foundling.plan.hardware import Gpu
from foundling.runtime.ceilings import Ceilings


def product_rate(gpu: Gpu, dtype: str, m: float, n: float, k: float) -> float:
    """FLOP/s of one matrix product."""
    curve = _curve(gpu, dtype, m, n, k)
    if gpu.ceilings is None:
        return curve
    cooler = K.product_in_step if dtype != "fp32" and gpu.name != "cpu" else 1.0
    return cooler * curve * math.exp(_correction(gpu, gpu.ceilings, dtype, m, n, k))


def _curve(gpu: Gpu, dtype: str, m: float, n: float, k: float) -> float:
    share, half = K.product_share, K.product_half
    if gpu.name == "cpu":
        share, half = K.cpu_share, K.cpu_half
    elif dtype == "fp32":
        share, half = K.fp32_share, K.fp32_half
    shape = math.prod(side / (side + half) for side in (m, n, k))
    return gpu.peak(dtype) * gpu.reach * share * shape


def _correction(gpu: Gpu, ceilings: Ceilings, dtype: str, m: float, n: float, k: float) -> float:
    """Mean of log(measured / curve) over the measured shapes, weighted by nearness."""
    total = weights = 0.0
    for rate in ceilings.matmul:
        if rate.dtype != dtype or rate.flops_per_s <= 0:
            continue
        sides = zip(sorted((m, n, k)), sorted((rate.m, rate.n, rate.k)), strict=True)
        distance = sum(math.log2(a / b) ** 2 for a, b in sides)
        weight = 1 / (0.25 + distance) ** 2
        off = math.log(rate.flops_per_s / _curve(gpu, dtype, rate.m, rate.n, rate.k))
        total, weights = total + weight * off, weights + weight
    return total / weights if weights else 0.0


def product_seconds(gpu: Gpu, dtype: str, m: float, n: float, k: float) -> float:
    """Seconds of one product: its FLOPs or its bytes, whichever take longer."""
    width = 4 if dtype == "fp32" else 2
    traffic = width * (m * k + k * n + m * n)
    return max(2 * m * n * k / product_rate(gpu, dtype, m, n, k), traffic / stream_rate(gpu))


def stream_rate(gpu: Gpu) -> float:
    """Bytes a second of elementwise kernels."""
    if gpu.ceilings is not None and gpu.ceilings.copy_bytes_per_s > 0:
        found = gpu.ceilings
        if gpu.name == "cpu" and found.norm_bytes_per_s > 0:
            # Arithmetic and not the memory holds a CPU up, and exponentials more than a norm.
            return found.norm_bytes_per_s * K.cpu_elementwise
        rates = [r for r in (found.copy_bytes_per_s, found.norm_bytes_per_s) if r > 0]
        return math.exp(sum(map(math.log, rates)) / len(rates))
    return gpu.bandwidth * K.elementwise_share


def optimizer_rate(gpu: Gpu) -> float:
    """Bytes a second of the optimizer's one pass."""
    if gpu.ceilings is not None and gpu.ceilings.optimizer_bytes_per_s > 0:
        return gpu.ceilings.optimizer_bytes_per_s
    return gpu.bandwidth * K.optimizer_share


def launch_seconds(gpu: Gpu) -> float:
    """Seconds that Python takes for one small operation."""
    if gpu.ceilings is not None and gpu.ceilings.launch_s > 0:
        return gpu.ceilings.launch_s
    return K.launch_s


def attention_rate(gpu: Gpu, dtype: str, kernel: str, head_width: int, seq_len: int) -> float:
    """FLOP/s of attention, forward and backward, counted causally (7 H T^2 D a row)."""
    if gpu.ceilings is not None and kernel in ("cudnn", "band", "flash", "flash3", "flash4", "cpu"):
        near = [rate for rate in gpu.ceilings.attention if rate.dtype == dtype]
        if near:
            best = min(
                near,
                key=lambda r: (
                    abs(math.log2(r.head_dim / head_width)) * 2 + abs(math.log2(r.seq / seq_len))
                ),
            )
            return best.flops_per_s * (K.band_share if kernel == "band" else 1)
    wide = head_width >= 96
    if kernel == "cpu":
        return gpu.peak(dtype) * 0.3
    if kernel in ("cudnn", "band", "flash3", "flash4"):
        # FlashAttention 4 is faster by 5% in wide heads and 14 to 20% in narrow ones, on an H200.
        share = K.cudnn_share_wide if wide else K.cudnn_share
        share *= K.band_share if kernel == "band" else 1
    else:
        share = K.flash_share_wide if wide else K.flash_share
    # Short rows leave blocks half masked: measured at 2048, where a block of 128 is 6% of a row.
    fill = (seq_len / (seq_len + 256)) / (2048 / (2048 + 256))
    return (
        gpu.peak(dtype)
        * gpu.reach
        * share
        * fill
        / (K.attention_overhead if kernel != "cpu" else 1)
    )
