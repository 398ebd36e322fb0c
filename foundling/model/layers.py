"""Layers of the transformer: RMSNorm and LayerNorm, rotary positions, embedding."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from foundling.config.model import ModelConfig
from foundling.runtime.device import has_triton

# The two norms, with or without learned scale and shift.
#
# Rejected: `torch.nn.LayerNorm` and `torch.nn.RMSNorm`, which agree neither in arguments nor in
# what can be left out.
#
# Statistics and scale are computed in fp32 at least, whatever the stream's precision; the result
# has the stream's.


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, dim: int, eps: float, *, scaled: bool = True) -> None:
        super().__init__()
        self.shape = (dim,)
        self.weight = nn.Parameter(torch.ones(dim)) if scaled else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight if self.weight is None else self.weight.to(wide)
        return F.rms_norm(x.to(wide), self.shape, weight, self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias."""

    def __init__(self, dim: int, eps: float, *, scaled: bool, shifted: bool) -> None:
        super().__init__()
        self.shape = (dim,)
        self.weight = nn.Parameter(torch.ones(dim)) if scaled else None
        self.bias = nn.Parameter(torch.zeros(dim)) if scaled and shifted else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        weight, bias = (None if p is None else p.to(wide) for p in (self.weight, self.bias))
        return F.layer_norm(x.to(wide), self.shape, weight, bias, self.eps).to(x.dtype)


def make_norm(config: ModelConfig, dim: int) -> nn.Module:
    """The config's norm over the last `dim` numbers."""
    scaled = config.norm_is_scaled
    if config.norm_is_rms:
        return RMSNorm(dim, config.norm_eps, scaled=scaled)
    return LayerNorm(dim, config.norm_eps, scaled=scaled, shifted=config.bias == "all")


def joined_linear(parts: Sequence[nn.Linear]) -> nn.Linear:
    """One linear layer whose outputs are those of `parts`, laid end to end."""
    whole = nn.Linear(1, 1, bias=parts[0].bias is not None, device="meta")
    whole.in_features = parts[0].in_features
    whole.out_features = sum(part.out_features for part in parts)
    whole.weight = nn.Parameter(torch.cat([part.weight.detach() for part in parts]))
    if parts[0].bias is not None:
        whole.bias = nn.Parameter(torch.cat([part.bias.detach() for part in parts]))
    return whole.requires_grad_(False)


# Rotary positions, in the half-split convention (coordinate i turns with coordinate i + D/2).
#
# The convention is Hugging Face's, so that weights travel without a permutation; Meta's interleaved
# pairs are the same function after reordering the rows of q and k. The tables are plain attributes
# and not buffers: `model.to(bfloat16)` must not round them, a checkpoint must not hold them, and
# they grow to the longest sequence met, so that no maximum length has to be declared.
#
# Scaling is Llama 3.1's: a rotation that turns fewer than `low` times within the original context
# is slowed by `factor`, one that turns more than `high` times is left, and between them the two
# blend.
#
# Shapes: B batch, T time, H heads, D head width.

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
    rope = config.rope_scaling
    if rope.factor == 1:
        return plain
    turns = rope.original * plain / (2 * math.pi)
    kept = ((turns - rope.low) / (rope.high - rope.low)).clamp(0, 1)
    return plain * (kept + (1 - kept) / rope.factor)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn x [B, T, H, D] by its position, in the tables' precision, back in its own.

    A roll by half a head and one addcmul: on a CPU about half the time of slicing and joining.
    """
    cos, sin = rotation
    wide = x.to(cos.dtype)
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


# Embedding tables: rows in, rows out, and on a GPU a backward pass without a sort.
#
# torch's own sorts the tokens to add each row up in order, once for every table; a model with value
# embeddings has one a layer. Adding rows as they come is several times as fast, and so are rows
# that leave in the products' precision. Where the order must not matter (train.deterministic) torch
# sorts as before.
#
# A table's gradient is as large as the table and most of it is zero. Where one process trains alone
# (`adds_in_place`), later micro-batches are added to the gradient that is there, instead of to a
# table of zeros which is then added to it.
#
# Shapes: B batch, T time, C width, V vocabulary.


class Embedding(nn.Embedding):
    """A table [V, C] whose rows come out in autocast's precision on a GPU."""

    adds_in_place = False
    """Whether the backward pass may add to the weight's gradient by itself, on a GPU: autograd
    and its hooks, such as DDP's, are not called."""

    def forward(self, input: Tensor) -> Tensor:
        """Rows [B, T, C] of tokens [B, T]."""
        # A weight that is cut over processes is a DTensor; to name it here would import it.
        if input.device.type != "cuda" or type(self.weight) not in (nn.Parameter, Tensor):
            return super().forward(input)
        dtype = self.weight.dtype
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
        in_place = self.adds_in_place and not torch.compiler.is_compiling()
        rows: Tensor = _Rows.apply(self.weight, input, dtype, in_place)  # type: ignore[no-untyped-call]
        return rows


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, table: Tensor, tokens: Tensor, dtype: torch.dtype, in_place: bool
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.shape, ctx.dtype = table.shape, table.dtype
        ctx.table = table if in_place else None
        return _taken(table, tokens, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        there = None if ctx.table is None else ctx.table.grad
        total = there
        if total is None:
            total = torch.zeros(ctx.shape, dtype=ctx.dtype, device=grad.device)
        rows, places = grad.flatten(0, -2), tokens.flatten()
        if ctx.dtype == torch.float32 and has_triton() and not _must_be_ordered():
            from foundling.model.kernels.triton_kernels import add_rows_

            add_rows_(total, places, rows)
        else:
            total.index_add_(0, places, rows.to(ctx.dtype))
        return (total if there is None else None), None, None, None


def _taken(table: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows in another precision, made by the cheaper of two ways to the same bits: narrow the
    rows, or the table, which writes and reads each row less where there are more rows than words.
    From fp32 to 16 bits that is 14 bytes a row's number against 4, and 6 a table's."""
    if dtype.itemsize < table.dtype.itemsize and 6 * len(table) < 10 * tokens.numel():
        return table.to(dtype)[tokens]
    return table[tokens].to(dtype)


def _must_be_ordered() -> bool:
    return torch.are_deterministic_algorithms_enabled()
