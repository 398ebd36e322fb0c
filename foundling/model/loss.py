"""Cross-entropy of the head as (sum, count) in chunks, softcapped, and logits in float8."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from foundling.runtime.device import has_triton

# float8 matmuls for the head, whose matmuls are the loss's own: torchao replaces linear layers, and
# the head is never called as one.
#
# Only logits are made so. The two matmuls of the gradient stay as they were: one of them is
# added up in fp32, which no float8 product does, and the other was not tried. Scales are powers of
# two: multiplied by one, a number in bf16 keeps its digits, and is rounded once.
#
# Shapes: N rows, C width, V vocabulary.

Kind = Literal["tensorwise", "rowwise"]
"""One scale for a whole tensor, or one for each of its rows."""
KIND = torch.float8_e4m3fn
MOST = float(torch.finfo(KIND).max)
LEAST = 1e-30
"""A row of zeros has a scale too."""


class Float8Matrix(NamedTuple):
    """A matrix in float8, and what each number (or each row) of it is to be multiplied by."""

    numbers: Tensor
    scale: Tensor
    """fp32, without dimensions or [rows, 1]."""

    @property
    def kind(self) -> Kind:
        """How it was scaled."""
        return "rowwise" if self.scale.dim() else "tensorwise"


def to_float8(wide: Tensor, kind: Kind) -> Float8Matrix:
    """A matrix as float8 holds it, as large as fits."""
    low, high = wide.aminmax(dim=1, keepdim=True) if kind == "rowwise" else wide.aminmax()
    largest = torch.maximum(-low, high).float().clamp(min=LEAST)
    up = torch.exp2(torch.floor(torch.log2(MOST / largest)))
    return Float8Matrix((wide * up.to(wide.dtype)).to(KIND), 1 / up)


def float8_matmul(wide: Tensor, right: Float8Matrix) -> Tensor:
    """[N, C] and [V, C] to their products [N, V], as wide as the first, which is converted too.
    Where there is no such unit (a CPU), the same numbers are multiplied in fp32."""
    left = to_float8(wide, right.kind)
    if wide.device.type == "cuda":
        # torch.nn.functional.scaled_mm, which wraps it, is newer than the oldest torch we take.
        found: Tensor = torch._scaled_mm(
            left.numbers,
            right.numbers.t(),
            scale_a=left.scale,
            scale_b=right.scale.t() if right.kind == "rowwise" else right.scale,
            out_dtype=wide.dtype,
            use_fast_accum=True,  # as torchao's forward products: rounded to bf16 in the end
        )
        return found
    exact = (left.numbers.float() * left.scale) @ (right.numbers.float() * right.scale).t()
    return exact.to(wide.dtype)


# Cross-entropy of the head as (sum, count), without the logits of the whole batch.
#
# Rows of the hidden state are taken in chunks; each chunk's logits are made, turned into the loss
# and at once into the gradients of hidden state and head, and dropped. So memory is one chunk of
# logits, and nothing is computed twice. Rejected: plain cross-entropy on full logits (at a
# vocabulary of 131,072 they are larger than everything else together), and checkpointing each chunk
# (the head's product, the largest of all, would be done twice).
#
# The sum is not divided: the step divides by the global count of targets, so that accumulation,
# padding and ragged ranks are exact.
#
# A softcap c bends the logits by c tanh(z / c), whose slope is 1 - tanh(z / c)^2.
#
# On a CUDA device the part between the products is one Triton kernel
# (model/kernels/triton_kernels.py) that turns a chunk's logits into their gradient in place.
#
# Shapes: N rows (batch x time), C width, V vocabulary.

IGNORE = -100
"""A target with this value is not counted."""

CHUNK_LOGITS = 1 << 21
"""Logits held at once on a CPU: what stays near its cache."""
SCORE_LOGITS = 1 << 23
"""Where nothing is kept for a backward pass: a quarter faster on a CPU than the chunks above."""
MOST_CHUNK_LOGITS = 1 << 30
"""On a GPU, where each chunk adds to the head's whole gradient once, so that few are better."""
CHUNK_SHARE = 128
"""... and no more logits than one for so many bytes of its memory: on a small card they are few."""
MOST_CHUNK_ROWS = 8192
"""... and no more rows than keep the products busy."""
ALIGNED = 64
"""Rows of zeros fill up the head to a multiple of this: tensor cores fetch 16 bytes at a time, and
with an odd vocabulary such as GPT-2's 50,257 cuBLAS takes kernels of two generations ago for two of
the head's three products, even where each row of logits begins at an even place (docs/log.md)."""
ALIGNED_ON = ("cuda",)


def cross_entropy_sum(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    softcap: float = 0.0,
    z_weight: float = 0.0,
    float8: Kind | None = None,
) -> tuple[Tensor, Tensor]:
    """Summed loss (fp32 scalar) and number of counted targets (int64 scalar).

    hidden [N, C], head [V, C], targets [N] with IGNORE where nothing is counted. `z_weight` adds
    that much of log(sum(exp(logits)))^2 to the loss of each target. With `float8` the logits are
    made of such numbers where gradients are wanted, and scored exactly where none are.
    """
    count = (targets != IGNORE).sum()
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    if torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad):
        total: Tensor = _HeadLoss.apply(  # type: ignore[no-untyped-call]
            hidden, head, targets, dtype, softcap, z_weight, float8
        )
        return total, count
    total, weight = zero_for(hidden), _filled_up(head, dtype)
    for rows in chunks(hidden, head):
        logits = (hidden[rows].to(dtype) @ weight.t())[:, : len(head)]
        total += row_losses(logits, targets[rows], softcap, z_weight).sum()
    return total, count


class _HeadLoss(torch.autograd.Function):
    """The gradients are made in the forward pass, chunk by chunk, and scaled in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        dtype: torch.dtype,
        softcap: float,
        z_weight: float,
        float8: Kind | None,
    ) -> Tensor:
        total, weight = zero_for(hidden), _filled_up(head, dtype)
        narrow = to_float8(weight, float8) if float8 else None
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_head = head.new_zeros(weight.shape) if ctx.needs_input_grad[1] else None
        for rows in chunks(hidden, head):
            chunk = hidden[rows].to(dtype)
            logits = float8_matmul(chunk, narrow) if narrow else chunk @ weight.t()
            bends = (softcap, z_weight)
            losses, grad = _in_their_place(logits, len(head), targets[rows], bends)
            total += losses.sum()
            if grad_hidden is not None and grad_hidden.dtype == dtype:
                torch.mm(grad, weight, out=grad_hidden[rows])
            elif grad_hidden is not None:
                grad_hidden[rows] = grad @ weight
            if grad_head is not None:
                add_product_(grad_head, grad.t(), chunk)
            del logits, grad  # before the next chunk's logits are made
        grad_head = None if grad_head is None else grad_head[: len(head)]
        ctx.save_for_backward(grad_hidden, grad_head)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head = (None if part is None else part * grad for part in ctx.saved_tensors)
        return hidden, head, None, None, None, None, None


def _filled_up(head: Tensor, dtype: torch.dtype) -> Tensor:
    """The head [V, C] in this precision; where that is a copy on a GPU, with rows of zeros after
    it that make every product even. Their logits are not read."""
    spare = -len(head) % ALIGNED
    if not spare or head.dtype == dtype or head.device.type not in ALIGNED_ON:
        return head.to(dtype)
    weight = head.new_empty(len(head) + spare, head.shape[1], dtype=dtype)
    weight[: len(head)] = head
    weight[len(head) :] = 0
    return weight


def _in_their_place(
    logits: Tensor, vocab: int, targets: Tensor, bends: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """`loss_and_gradient` of the first `vocab` logits of each row; the gradient is as wide as the
    rows, and zero after them."""
    if logits.shape[1] == vocab:
        return loss_and_gradient(logits, targets, *bends)
    part = logits[:, :vocab]
    losses, grad = loss_and_gradient(part, targets, *bends)
    if grad is not part:  # without the kernel
        part.copy_(grad)
    logits[:, vocab:] = 0  # as they are, unless a row is NaN
    return losses, logits


def loss_and_gradient(
    logits: Tensor, targets: Tensor, softcap: float, z_weight: float
) -> tuple[Tensor, Tensor]:
    """Losses [n] of logits [n, V], and the gradient of the logits in their dtype; both are zero
    where the target is IGNORE. The logits are used up."""
    if _has_kernel(logits):
        from foundling.model.kernels.triton_kernels import loss_and_gradient_

        losses = loss_and_gradient_(
            logits, targets, ignored=IGNORE, softcap=softcap, z_weight=z_weight
        )
        return losses, logits
    keep = (targets != IGNORE)[:, None]
    # An ignored row still needs a class to look up; it is multiplied by zero.
    index = targets.masked_fill(~keep[:, 0], 0)[:, None]
    dtype, wide, bent = logits.dtype, widen(logits), None
    if softcap:
        bent = (wide / softcap).tanh_()
        wide = softcap * bent
    log_sum = wide.logsumexp(-1, keepdim=True)
    losses = log_sum - wide.gather(1, index) + z_weight * log_sum.square()
    # Softmax minus one at the target; at most two tensors as wide as the vocabulary are held at
    # once (three with a softcap), because these are the largest of the whole step.
    grad = (wide - log_sum).exp_()
    del wide
    if z_weight:
        grad *= 1 + 2 * z_weight * log_sum
    grad.scatter_add_(1, index, grad.new_full((1, 1), -1.0).expand_as(index))
    if bent is not None:
        grad.addcmul_(grad, bent.square_(), value=-1)  # times the slope
    return (losses * keep)[:, 0], grad.mul_(keep).to(dtype)


def row_losses(logits: Tensor, targets: Tensor, softcap: float, z_weight: float) -> Tensor:
    """Losses [n] of logits [n, V], which are used up; 0 where the target is IGNORE."""
    if _has_kernel(logits):
        return loss_and_gradient(logits, targets, softcap, z_weight)[0]
    keep = targets != IGNORE
    wide = cap(widen(logits), softcap)
    log_sum = wide.logsumexp(-1)
    wanted = wide.gather(1, targets.masked_fill(~keep, 0)[:, None])[:, 0]
    return (log_sum - wanted + z_weight * log_sum.square()) * keep


def _has_kernel(logits: Tensor) -> bool:
    narrow = logits.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return logits.device.type == "cuda" and narrow and has_triton()


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, without a rounded copy of the product where the device can."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.device.type == "cuda" and torch.version.cuda:
        # cuBLAS adds to fp32 what it multiplied in 16 bits: one pass over a head's gradient.
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def cap(logits: Tensor, softcap: float) -> Tensor:
    """Logits after the softcap; 0 caps nothing."""
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def logits_of(chunk: Tensor, weight: Tensor) -> Tensor:
    """Logits [n, V] of a chunk [n, C], wide enough for a softmax."""
    return widen(chunk @ weight.t())


def widen(logits: Tensor) -> Tensor:
    """Wide enough for a softmax."""
    return logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)


def zero_for(like: Tensor) -> Tensor:
    """Where a loss is added up."""
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.zeros((), dtype=wide, device=like.device)


def chunks(hidden: Tensor, head: Tensor, least: int = 0) -> Iterator[slice]:
    """Runs of rows whose logits are held at once, `least` of them where that is more than usual."""
    rows = max(1, max(_most_logits(hidden.device), least) // len(head))
    if hidden.device.type == "cuda":
        rows = min(rows, MOST_CHUNK_ROWS)
    for first in range(0, len(hidden), rows):
        yield slice(first, first + rows)


@lru_cache
def _most_logits(device: torch.device) -> int:
    if device.type != "cuda":
        return CHUNK_LOGITS
    memory = torch.cuda.get_device_properties(device).total_memory
    return min(MOST_CHUNK_LOGITS, memory // CHUNK_SHARE)
