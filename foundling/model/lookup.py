"""Embedding tables: rows in, rows out, and on a GPU a backward pass without a sort.

torch's own sorts the tokens to add each row up in order, once for every table; a model with value
embeddings has one a layer. Adding rows as they come is several times as fast, and so are rows that
leave in the products' precision. Where the order must not matter (train.deterministic) torch sorts
as before.

A table's gradient is as large as the table and most of it is zero. Where one process trains alone
(`adds_in_place`), later micro-batches are added to the gradient that is there, instead of to
a table of zeros which is then added to it.

Shapes: B batch, T time, C width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from foundling.runtime.imports import triton_is_here


class Lookup(nn.Embedding):
    """A table [V, C] whose rows come out in autocast's precision on a GPU."""

    adds_in_place = False
    """Whether the backward pass may add to the weight's gradient by itself, on a GPU: autograd
    and whoever listens to it, as DDP does, learn nothing of it."""

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
        if ctx.dtype == torch.float32 and triton_is_here() and not _must_be_ordered():
            from foundling.model.lookup_kernel import add_rows_

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
