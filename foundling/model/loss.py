"""Cross-entropy of the head as (sum, count), without the logits of the whole batch.

Rows of the hidden state are taken in chunks; each chunk's logits are made, turned into the loss and
at once into the gradients of hidden state and head, and dropped. So memory is one chunk of logits,
and nothing is computed twice. Rejected: plain cross-entropy on full logits (at a vocabulary of
131,072 they are larger than everything else together), and checkpointing each chunk (the head's
product, the largest of all, would be done twice).

The sum is not divided: the step divides by the global count of targets, so that accumulation,
padding and ragged ranks are exact.

A softcap c bends the logits by c tanh(z / c), whose slope is 1 - tanh(z / c)^2.

Shapes: N rows (batch x time), C width, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100
"""A target with this value is not counted."""

CHUNK_LOGITS = {"cpu": 1 << 21, "cuda": 1 << 28}
"""Logits held at once: on a CPU what stays near its cache, on a GPU what keeps it busy."""


def cross_entropy_sum(
    hidden: Tensor, head: Tensor, targets: Tensor, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Summed loss (fp32 scalar) and number of counted targets (int64 scalar).

    hidden [N, C], head [V, C], targets [N] with IGNORE where nothing is counted.
    """
    counted = targets != IGNORE
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    # An ignored row still needs a class to look up; it is multiplied by zero.
    classes = targets.masked_fill(~counted, 0)
    if torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad):
        total: Tensor = _HeadLoss.apply(  # type: ignore[no-untyped-call]
            hidden, head, classes, counted, dtype, softcap
        )
        return total, counted.sum()
    total, weight = _zero(hidden), head.to(dtype)
    for rows in _chunks(hidden, head):
        logits = cap(_logits(hidden[rows].to(dtype), weight), softcap)
        logp = logits.log_softmax(-1)
        total -= (logp.gather(1, classes[rows, None])[:, 0] * counted[rows]).sum()
    return total, counted.sum()


class _HeadLoss(torch.autograd.Function):
    """The gradients are made in the forward pass, chunk by chunk, and scaled in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        classes: Tensor,
        counted: Tensor,
        dtype: torch.dtype,
        softcap: float,
    ) -> Tensor:
        total, weight = _zero(hidden), head.to(dtype)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        for rows in _chunks(hidden, head):
            chunk, keep = hidden[rows].to(dtype), counted[rows, None]
            loss, grad = _chunk_loss(chunk, weight, classes[rows, None], keep, softcap)
            total -= loss
            # Ignored rows are zeroed here, in the products' narrow side C, and not V wide.
            if grad_hidden is not None:
                torch.mul(grad @ weight, keep, out=grad_hidden[rows])
            if grad_head is not None:
                grad_head += grad.t() @ (chunk * keep)
            del grad  # before the next chunk's logits are made
        ctx.save_for_backward(grad_hidden, grad_head)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head = (None if part is None else part * grad for part in ctx.saved_tensors)
        return hidden, head, None, None, None, None


def _chunk_loss(
    chunk: Tensor, weight: Tensor, index: Tensor, keep: Tensor, softcap: float
) -> tuple[Tensor, Tensor]:
    """Summed log-probability of the targets, and the gradient of the logits in the products' dtype:
    softmax minus one at the target. At most two tensors as wide as the vocabulary are held at once
    (three with a softcap), because these are the largest of the whole step."""
    logits, bent = _logits(chunk, weight), None
    if softcap:
        bent = logits.div_(softcap).tanh_()
        logits = softcap * bent
    logp = logits.log_softmax(-1)
    del logits
    total = (logp.gather(1, index) * keep).sum()
    grad = logp.exp_().scatter_add_(1, index, logp.new_full((1, 1), -1.0).expand_as(index))
    if bent is not None:
        grad.addcmul_(grad, bent.square_(), value=-1)  # times the slope
    return total, grad.to(chunk.dtype)


def cap(logits: Tensor, softcap: float) -> Tensor:
    """Logits after the softcap; 0 caps nothing."""
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def _logits(chunk: Tensor, weight: Tensor) -> Tensor:
    logits = chunk @ weight.t()
    return logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)


def _zero(like: Tensor) -> Tensor:
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.zeros((), dtype=wide, device=like.device)


def _chunks(hidden: Tensor, head: Tensor) -> Iterator[slice]:
    limit = CHUNK_LOGITS.get(hidden.device.type, CHUNK_LOGITS["cpu"])
    rows = max(1, limit // len(head))
    for first in range(0, len(hidden), rows):
        yield slice(first, first + rows)
