"""The fused head loss where each tensor-parallel rank holds some rows of the head.

A rank makes the logits of its own part of the vocabulary and never sees the others; for each
chunk the ranks agree on the maximum, then on the sum of exponentials and the target's logit: three
numbers a row instead of the vocabulary. The gradient of the hidden state comes out as this rank's
part of a sum, which the caller declares and DTensor adds up.

Shapes: N rows (batch x time), C width, V vocabulary, W this rank's part of it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from foundling.model.loss import IGNORE, chunks, logits_of, zero_for


def vocab_parallel_loss(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    softcap: float,
    first: int,
    group: dist.ProcessGroup,
    z_weight: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Summed loss and number of counted targets, the same on every rank of `group`.

    hidden [N, C] whole, head [W, C] the rows from `first` on, targets [N]; `z_weight` is that of
    the squared log-sum, as in foundling/model/loss.py.
    """
    counted = targets != IGNORE
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    total: Tensor = _VocabLoss.apply(  # type: ignore[no-untyped-call]
        hidden, head, targets, counted, dtype, (softcap, z_weight), first, group
    )
    return total, counted.sum()


class _VocabLoss(torch.autograd.Function):
    """Gradients are made in the forward pass, as in foundling/model/loss.py."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        counted: Tensor,
        dtype: torch.dtype,
        bends: tuple[float, float],
        first: int,
        group: dist.ProcessGroup,
    ) -> Tensor:
        total, weight = zero_for(hidden), head.to(dtype)
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        for rows in chunks(hidden, head):
            chunk, keep = hidden[rows].to(dtype), counted[rows, None]
            loss, grad = _chunk_loss(chunk, weight, targets[rows] - first, keep, bends, group)
            total += loss
            if grad_hidden is not None:
                torch.mul(grad @ weight, keep, out=grad_hidden[rows])
            if grad_head is not None:
                grad_head += grad.t() @ (chunk * keep)
            del grad
        ctx.save_for_backward(grad_hidden, grad_head)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head = (None if part is None else part * grad for part in ctx.saved_tensors)
        return hidden, head, None, None, None, None, None, None


def _chunk_loss(
    chunk: Tensor,
    weight: Tensor,
    places: Tensor,
    keep: Tensor,
    bends: tuple[float, float],
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Summed loss of a chunk, and the gradient of this rank's logits; `bends` are softcap and
    weight of the squared log-sum."""
    logits, bent = logits_of(chunk, weight), None
    softcap, z_weight = bends
    if softcap:
        bent = logits.div_(softcap).tanh_()
        logits = softcap * bent
    highest = logits.amax(-1)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    logits.sub_(highest[:, None])
    mine = (places >= 0) & (places < len(weight))
    index = places.clamp(0, len(weight) - 1)[:, None]
    target = logits.gather(1, index)[:, 0] * mine
    grad = logits.exp_()
    sums = torch.stack((grad.sum(-1), target))
    dist.all_reduce(sums, group=group)
    losses = sums[0].log() - sums[1]
    grad.div_(sums[0][:, None])
    if z_weight:
        log_sum = highest + sums[0].log()
        losses += z_weight * log_sum.square()
        grad *= (1 + 2 * z_weight * log_sum)[:, None]
    loss = (losses * keep[:, 0]).sum()
    grad.scatter_add_(1, index, -mine[:, None].to(grad.dtype))
    if bent is not None:
        grad.addcmul_(grad, bent.square_(), value=-1)
    return loss, grad.to(chunk.dtype)
