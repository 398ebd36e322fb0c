"""What activation offload costs: copies to the host beside the forward pass, back beside the
backward pass, and a wait for what is longer than the work.

A block's bytes and its FLOPs both grow with the rows, so more rows do not help; wider models do,
whose FLOPs grow with the square of the width, and recompute, which leaves little to send.
"""

from collections.abc import Mapping

from foundling.config.recompute import recomputed_blocks
from foundling.plan.activations import offloaded_bytes
from foundling.plan.coefficients import COEFFICIENTS as K
from foundling.plan.hardware import Gpu
from foundling.plan.work import Work

PARTS = ("matrix", "attention", "elementwise", "other")
"""Seconds behind which copies can hide: the blocks' own."""


def bus_s(work: Work, gpu: Gpu) -> float:
    """Seconds that a micro-step's copies take, one way."""
    return offloaded_bytes(work, gpu) / (gpu.host * K.host_share)


def bus_wait_s(work: Work, gpu: Gpu, parts: Mapping[str, float]) -> float:
    """Seconds of a micro-step in which the GPU waits for the bus."""
    layers = work.model.layers
    again = len(recomputed_blocks(work.recompute, layers)) / layers
    if work.recompute == "per-op":
        again = 0.0  # what is made again are not the products
    blocks = sum(parts.get(name, 0.0) for name in PARTS) * (layers - 1) / layers
    forward = blocks / (3 + again)
    wire = bus_s(work, gpu)
    return max(0.0, wire - forward) + max(0.0, wire - (blocks - forward))


def host_bytes(work: Work, gpu: Gpu) -> float:
    """Pinned memory of the host; torch rounds each buffer up to a power of two, by half on
    average and twice at the most."""
    return 1.5 * offloaded_bytes(work, gpu)


def told_offload(work: Work, gpu: Gpu, waits_s: float) -> str:
    """How much travels, what the host must hold, and whether the work hides it."""
    gigabytes, pinned = offloaded_bytes(work, gpu) / 1e9, host_bytes(work, gpu) / 1e9
    wire = bus_s(work, gpu) * work.accumulation
    hidden = "all of it behind the blocks' work"
    if waits_s > 0:
        hidden = f"of which a step waits for {waits_s * 1e3:,.0f} ms"
    return (
        f"parallel.offload_activations: {gigabytes:,.1f} GB of a micro-step wait on the host (about"
        f" {pinned:,.0f} GB pinned), {wire * 1e3:,.0f} ms of a step each way, {hidden}"
    )
