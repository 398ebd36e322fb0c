"""Model and loss as one module, by each way to compute the head's cross-entropy; vocab-parallel
loss."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from foundling.config.errors import ConfigError
from foundling.model.loss import IGNORE, chunks, logits_of, widen, zero_for
from foundling.model.transformer import Transformer

# `fused` is ours (foundling/model/loss.py) and the default. The others are there to be compared
# with: whole logits, torch's own linear_cross_entropy, and liger's kernel.


class LossModule(nn.Module):
    """The model seen as a loss: DDP only works through `forward`, and ours must be the loss."""

    def __init__(self, model: Transformer, loss: str = "fused", z_loss: float = 0.0) -> None:
        super().__init__()
        self.model, self.loss = model, "fused" if loss == "auto" else loss
        self.of_logits = plain_loss
        """A bench may compile it; a run does not: it is what the others are held to."""
        model.z_loss = z_loss
        if loss == "torch" and not hasattr(F, "linear_cross_entropy"):
            raise ConfigError(
                f"train.kernels.loss torch needs torch's linear_cross_entropy, which torch"
                f" {torch.__version__} does not have; use fused."
            )
        if loss == "torch" and (model.config.logit_softcap or z_loss):
            raise ConfigError(
                "train.kernels.loss torch knows neither softcap nor z-loss; use fused."
            )
        if loss == "liger":
            if next(model.parameters()).device.type == "cpu":
                raise ConfigError(
                    "train.kernels.loss liger needs a GPU and this is a CPU; use fused."
                )
            _find_liger()

    def forward(
        self, tokens: Tensor, targets: Tensor, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(loss_sum, token_count) of one micro-batch."""
        model = self.model
        if self.loss == "fused" or not torch.is_grad_enabled():
            return model.loss(tokens, targets, documents)
        if self.loss == "plain":
            return self.of_logits(model(tokens, documents), targets, model.z_loss)
        hidden = model.hidden(tokens, documents).flatten(0, 1)
        # Both want weights in the products' precision, as autocast would make them.
        weight, goals = model.head_weight.to(hidden.dtype), targets.flatten()
        count = (targets != IGNORE).sum()
        if self.loss == "torch":
            return torch_loss(hidden, weight, goals), count
        return liger_loss(hidden, weight, goals, model.config.logit_softcap, model.z_loss), count


def plain_loss(logits: Tensor, targets: Tensor, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
    """Cross-entropy of whole logits [B, T, V], summed in fp32, and the number of counted targets.

    What everyone writes first, kept as the yardstick of the fused loss in memory and in time.
    """
    wide = widen(logits.flatten(0, 1))
    goals = targets.flatten()
    total = F.cross_entropy(wide, goals, ignore_index=IGNORE, reduction="sum")
    if z_loss:
        total = total + z_loss * (wide.logsumexp(-1).square() * (goals != IGNORE)).sum()
    return total, (targets != IGNORE).sum()


def torch_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """torch's own, from 2.13 on; in chunks, which it does only where options are given."""
    options: Any = getattr(nn, "LinearCrossEntropyOptions", lambda: None)
    loss: Any = F.linear_cross_entropy  # type: ignore[attr-defined, unused-ignore]
    total: Tensor = loss(
        hidden, head, targets, reduction="sum", ignore_index=IGNORE, options=options()
    )
    return total


def liger_loss(
    hidden: Tensor, head: Tensor, targets: Tensor, softcap: float, z_loss: float
) -> Tensor:
    """liger-kernel's fused linear cross-entropy."""
    loss = _find_liger()(
        ignore_index=IGNORE, lse_square_scale=z_loss, reduction="sum", softcap=softcap or None
    )
    total: Tensor = loss(head, hidden, targets)
    return total


def _find_liger() -> Any:
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError as error:
        raise ConfigError(
            "train.kernels.loss liger needs liger-kernel; install it with `pip install"
            " 'foundling[liger]'`, or use fused."
        ) from error
    return LigerFusedLinearCrossEntropyLoss


# The fused head loss where each tensor-parallel rank holds some rows of the head.
#
# A rank makes the logits of its own part of the vocabulary and never sees the others; for each
# chunk the ranks agree on the maximum, then on the sum of exponentials and the target's logit:
# three numbers a row instead of the vocabulary. The gradient of the hidden state comes out as this
# rank's part of a sum, which the caller declares and DTensor adds up.
#
# Shapes: N rows (batch x time), C width, V vocabulary, W this rank's part of it.


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
        softcap_and_z: tuple[float, float],
        first: int,
        group: dist.ProcessGroup,
    ) -> Tensor:
        total, weight = zero_for(hidden), head.to(dtype)
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        for rows in chunks(hidden, head):
            chunk, keep = hidden[rows].to(dtype), counted[rows, None]
            loss, grad = _chunk_loss(
                chunk, weight, targets[rows] - first, keep, softcap_and_z, group
            )
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
    softcap_and_z: tuple[float, float],
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Summed loss of a chunk, and the gradient of this rank's logits."""
    logits, bent = logits_of(chunk, weight), None
    softcap, z_weight = softcap_and_z
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
