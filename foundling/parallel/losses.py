"""The model seen as a loss, by each of the ways there are to compute the head's cross-entropy.

`fused` is ours (foundling/model/loss.py) and the default. The others are there to be compared with:
whole logits, torch's own linear_cross_entropy, and liger's kernel.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundling.config.errors import ConfigError
from foundling.model import IGNORE, Transformer
from foundling.model.loss import widen


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
                f"train.loss torch needs torch's linear_cross_entropy, which torch"
                f" {torch.__version__} does not have; use fused."
            )
        if loss == "torch" and (model.config.logit_softcap or z_loss):
            raise ConfigError("train.loss torch knows neither softcap nor z-loss; use fused.")
        if loss == "liger":
            if next(model.parameters()).device.type == "cpu":
                raise ConfigError("train.loss liger needs a GPU and this is a CPU; use fused.")
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
            "train.loss liger needs liger-kernel; install it with `pip install"
            " 'foundling[liger]'`, or use fused."
        ) from error
    return LigerFusedLinearCrossEntropyLoss
