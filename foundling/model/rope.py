"""Rotary positions, in the half-split convention (coordinate i turns with coordinate i + D/2).

The convention is Hugging Face's, so that weights travel without a permutation; Meta's interleaved
pairs are the same function after reordering the rows of q and k. The tables are plain attributes
and not buffers: `model.to(bfloat16)` must not round them, a checkpoint must not hold them, and they
grow to the longest sequence met, so that no maximum length has to be declared.

Scaling is Llama 3.1's: a rotation that turns fewer than `low` times within the original context is
slowed by `factor`, one that turns more than `high` times is left, and between them the two blend.

Shapes: B batch, T time, H heads, D head width.
"""

import math

import torch
from torch import Tensor

from foundling.config import ModelConfig

Rotation = tuple[Tensor, Tensor]
"""(cos, sin), each [T, 1, D] or [B, T, 1, D]; the first half of sin is negated."""

_SMALLEST_TABLE = 256


class Rope:
    """Tables of cos and sin, made once per device and grown when a longer sequence comes."""

    def __init__(self, config: ModelConfig) -> None:
        self._frequencies = frequencies(config)
        self._tables: dict[tuple[torch.device, torch.dtype], Rotation] = {}

    def upto(self, length: int, device: torch.device, dtype: torch.dtype) -> Rotation:
        """Rotations of positions 0 .. length - 1."""
        cos, sin = self._table(length, device, dtype)
        return cos[:length], sin[:length]

    def at(self, positions: Tensor, length: int, dtype: torch.dtype) -> Rotation:
        """Rotations of `positions` [B, T], all below `length` (a host number: no device sync)."""
        cos, sin = self._table(length, positions.device, dtype)
        return cos[positions], sin[positions]

    def _table(self, length: int, device: torch.device, dtype: torch.dtype) -> Rotation:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        table = self._tables.get((device, wide))
        if table is None or len(table[0]) < length:
            size = max(_SMALLEST_TABLE, 1 << (length - 1).bit_length())
            # Sampling runs in inference mode; a table born there could never be trained with.
            with torch.inference_mode(False):
                table = self._make(size, device, wide)
            self._tables[device, wide] = table
        return table

    def _make(self, size: int, device: torch.device, dtype: torch.dtype) -> Rotation:
        # Angles in float64 on the CPU: the same table on every device, exact at long contexts.
        times = torch.arange(size, dtype=torch.float64, device="cpu")
        angles = torch.outer(times, self._frequencies)[:, None]
        cos, sin = angles.cos(), angles.sin()
        return (
            torch.cat((cos, cos), -1).to(device, dtype),
            torch.cat((-sin, sin), -1).to(device, dtype),
        )


def frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each pair of coordinates [D / 2], scaled where the config says so."""
    pairs = torch.arange(0, config.head_width, 2, dtype=torch.float64, device="cpu")
    plain: Tensor = config.rope_theta ** (-pairs / config.head_width)
    if config.rope_scaling == 1:
        return plain
    turns = config.rope_original * plain / (2 * math.pi)
    kept = ((turns - config.rope_low) / (config.rope_high - config.rope_low)).clamp(0, 1)
    return plain * (kept + (1 - kept) / config.rope_scaling)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn x [B, T, H, D] by its position, in the tables' precision, back in its own.

    A roll by half a head and one addcmul: on a CPU about half the time of slicing and joining.
    """
    cos, sin = rotation
    wide = x.to(cos.dtype)
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)
