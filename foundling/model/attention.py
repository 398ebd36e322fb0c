"""Grouped-query attention, causal and optionally kept inside documents.

How scores become mixed values is a kernel's affair (kernels.py). Rejected: repeating keys and
values by hand (the kernels do it without a copy), and a mask for plain causal attention (twice the
work on every kernel).

Shapes: B batch, T time, S keys, H query heads, K key/value heads, D head width.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from foundling.config.model import VALUE_GATE_WIDTH, ModelConfig
from foundling.model.kernels.attention_backends import (
    TORCH,
    Kernel,
    document_begins,
    without_gradients,
)
from foundling.model.layers import Rotation, make_norm, rotate


class Cache(Protocol):
    """What the model asks of a key-value cache; `generate` has the one that is used.

    Key slot s of a row holds its position s.
    """

    def positions(self, width: int) -> Tensor:
        """Positions [B, width] that the next `width` tokens of each row will have."""

    def mask(self, width: int, window: int = 0) -> Tensor | None:
        """True where a new token may look, [B, 1, width, S]; None where causality says it all.

        A window hides what is `window` or more positions back; 0 hides nothing.
        """

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values [B, K, width, D]; give back all of them [B, K, S, D]."""

    def advance(self, counts: Sequence[int]) -> None:
        """Count the first `counts[r]` of the tokens just written to row r as real."""

    def reach(self, width: int) -> int:
        """One more than the last position that the next `width` tokens touch, over all rows."""


class Attention(nn.Module):
    """q, k, v, rotation, attention, o; with norms of q and k or a value embedding where asked."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_width
        self.dropout = config.dropout
        self.kernel: Kernel = TORCH
        self.masked_kernel: Kernel = TORCH
        """Where there is a mask of documents or of a window."""
        q_width, kv_width = config.heads * self.head_dim, config.num_kv_heads * self.head_dim
        biased = config.bias != "none"
        self.q = nn.Linear(config.dim, q_width, bias=biased)
        self.k = nn.Linear(config.dim, kv_width, bias=biased)
        self.v = nn.Linear(config.dim, kv_width, bias=biased)
        self.o = nn.Linear(q_width, config.dim, bias=config.bias == "all")
        self.q_norm = make_norm(config, self.head_dim) if config.qk_norm else None
        self.k_norm = make_norm(config, self.head_dim) if config.qk_norm else None
        self.value_gate: nn.Linear | None = None
        if layer in config.value_layers:
            self.value_gate = nn.Linear(VALUE_GATE_WIDTH, config.num_kv_heads, bias=False)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        mask: Any,
        cache: Cache | None,
        values: Tensor | None = None,
    ) -> Tensor:
        q = self.q(x).view(*x.shape[:-1], -1, self.head_dim)
        k, v = self.keys_and_values(x, rotation, values)
        if self.q_norm is not None:
            # Autocast norms in fp32; the products after this are in the values' precision.
            q = self.q_norm(q).to(v.dtype)
        if rotation is not None:
            q = rotate(q, rotation)
        q = q.transpose(1, 2)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        kernel = TORCH if cache is not None else self.kernel if mask is None else self.masked_kernel
        kernel = without_gradients(kernel, q.device)
        mixed = kernel.attend(q, k, v, mask, self.dropout if self.training else 0.0)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out

    def keys_and_values(
        self, x: Tensor, rotation: Rotation | None, values: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What later positions see of these, each [B, K, T, D]."""
        heads = (*x.shape[:-1], -1, self.head_dim)
        k = self.k(x).view(heads)
        if self.k_norm is not None:
            k = self.k_norm(k).to(k.dtype)
        if rotation is not None:
            k = rotate(k, rotation)
        if self.value_gate is None or values is None:
            return k.transpose(1, 2), self.v(x).view(heads).transpose(1, 2)
        # Between 0 and 2 for each head, and 1 while the gate's weights are zero.
        gate = 2 * torch.sigmoid(self.value_gate(x[..., :VALUE_GATE_WIDTH]))
        v = self.v(x).view(heads)
        v = v + (gate[..., None] * values.view(heads)).to(v.dtype)
        return k.transpose(1, 2), v.transpose(1, 2)


def document_starts(documents: Tensor) -> Tensor:
    """Where in its row the document of each position begins, [B, T]."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    return places.masked_fill(~document_begins(documents), 0).cummax(1).values
