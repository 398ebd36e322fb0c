"""Grouped-query attention, causal and optionally kept inside documents.

How scores become mixed values is a kernel's affair (kernels.py). Rejected: repeating keys and
values by hand (the kernels do it without a copy), and a mask for plain causal attention (twice the
work on every kernel).

Shapes: B batch, T time, S keys, H query heads, K key/value heads, D head width.
"""

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
from foundling.model.layers import Rotation, joined_linear, make_norm, rotate


class Cache(Protocol):
    """What the model asks of a key-value cache; `generate` has the one that is used.

    It knows which tokens this step brings, to which requests they belong and where each stands.
    """

    reach: int
    """One more than the last position of this step, known without asking the device."""

    def positions(self) -> Tensor:
        """Positions [B, T] of this step's tokens."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store keys and values [B, T, K, D]; mixed values [B, T, H, D] of the queries over all
        that their request has stored in this layer, as far as the layer's window reaches."""


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
        self.qkv: nn.Linear | None = None
        """All three as one product, once `join_products` has been called."""
        self.widths = (q_width, kv_width, kv_width)
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
        q, k, v = self.project(x, rotation, values)
        if cache is not None:
            cached: Tensor = self.o(cache.attend(self.layer, q, k, v).flatten(2))
            return cached
        kernel = self.kernel if mask is None else self.masked_kernel
        kernel = without_gradients(kernel, q.device)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = kernel.attend(q, k, v, mask, self.dropout if self.training else 0.0)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out

    def project(
        self, x: Tensor, rotation: Rotation | None, values: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, H, D], keys and values [B, T, K, D] of normed states [B, T, C]."""
        if self.qkv is None:
            flat = self.q(x), self.k(x), self.v(x)
        else:
            flat = self.qkv(x).split(self.widths, -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in flat)
        if self.q_norm is not None and self.k_norm is not None:
            # Autocast norms in fp32; the products after this are in the values' precision.
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(k.dtype)
        if rotation is not None and self.qkv is not None:
            # Together: in decoding the number of operations counts, and not their size.
            both = rotate(torch.cat((q, k), -2), rotation)
            q, k = both.tensor_split((q.shape[-2],), -2)
        elif rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if self.value_gate is not None and values is not None:
            # Between 0 and 2 for each head, and 1 while the gate's weights are zero.
            gate = 2 * torch.sigmoid(self.value_gate(x[..., :VALUE_GATE_WIDTH]))
            v = v + (gate[..., None] * values.view(v.shape)).to(v.dtype)
        return q, k, v

    def join_products(self) -> None:
        """Make q, k and v by one product from now on: for a model that is not trained further."""
        self.qkv = joined_linear([self.q, self.k, self.v])
        del self.q, self.k, self.v


def document_starts(documents: Tensor) -> Tensor:
    """Where in its row the document of each position begins, [B, T]."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    return places.masked_fill(~document_begins(documents), 0).cummax(1).values
