"""Which way to compute the head's cross-entropy: found by launching each at the run's own width and
vocabulary, where `train.kernels.loss` is auto.

Ours, torch's and liger's never hold the whole logits; plain ones do, and are only for comparison.
Each is held to float64 on a few rows first: a loss whose gradients are zeros is the fastest of all.
"""

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from foundling.config.model import ModelConfig
from foundling.config.parallel import ParallelConfig
from foundling.config.train import TrainConfig
from foundling.model.loss import cross_entropy_sum, widen
from foundling.parallel.losses import liger_loss, plain_loss, torch_loss
from foundling.runtime.device import DeviceChoice
from foundling.train.autotune.harness import (
    candidate_seconds,
    max_relative_error,
    pick,
    try_candidate,
)

CHECKED_ROWS = 32
MOST_ROWS = 16384
"""Most rows that are timed: more than one of our chunks."""
MOST_WORK = {"cuda": 10**15, "cpu": 10**10}
"""FLOP of both passes: a tenth of a second of two cores, and of a GPU more than all the rows."""
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Hidden [N, C], head [V, C] and targets [N] to the summed loss."""


def choose_loss(
    model: ModelConfig, train: TrainConfig, parallel: ParallelConfig, choice: DeviceChoice
) -> tuple[str, str]:
    """The loss to use, and a line about it where there was a choice."""
    if train.kernels.loss != "auto":
        return train.kernels.loss, ""
    losses, reasons = available_losses(model, train, parallel, choice)
    if len(losses) == 1:
        missing = "; ".join(f"no {name}: {reason}" for name, reason in reasons.items())
        return "fused", f"loss fused ({missing})"
    tried = [
        try_candidate(
            name,
            lambda: max_relative_error(*float64_check_inputs(loss, model, train, choice)),  # noqa: B023 - called at once
            lambda: _seconds(model, train, choice, loss),  # noqa: B023
        )
        for name, loss in losses.items()
    ]
    if choice.device.type == "cuda":
        torch.cuda.empty_cache()
    working, why = pick(tried)
    reasons |= {one.name: one.refusal for one in tried if one.refusal}
    refused = "".join(f"; {name}: {reason}" for name, reason in reasons.items())
    if "fused" in reasons:  # it has a plain form on every device
        return "fused", f"loss fused (WARNING: it could not be timed{refused})"
    return working[0].name, f"loss {working[0].name} ({why}{refused})"


def plain_loss_fn(model: ModelConfig, train: TrainConfig) -> Loss:
    """The loss of whole logits, the reference that the others are compared with."""
    softcap, z_loss = model.logit_softcap, train.z_loss

    def plain(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(hidden, head)
        if softcap:
            logits = softcap * torch.tanh(widen(logits) / softcap)
        return plain_loss(logits[None], targets, z_loss)[0]

    return plain


def available_losses(
    model: ModelConfig, train: TrainConfig, parallel: ParallelConfig, choice: DeviceChoice
) -> tuple[dict[str, Loss], dict[str, str]]:
    """The losses that this model and device allow, and the reasons against the others."""
    softcap, z_loss = model.logit_softcap, train.z_loss
    float8 = train.head_float8
    losses: dict[str, Loss] = {
        "fused": lambda hidden, head, targets: cross_entropy_sum(
            hidden, head, targets, softcap, z_loss, float8
        )[0]
    }
    reasons: dict[str, str] = {}
    setting = next((name for name in ("shard", "tensor") if getattr(parallel, name) > 1), "")
    if setting:
        return losses, dict.fromkeys(("torch", "liger"), f"parallel.{setting} cuts the head")
    if not hasattr(F, "linear_cross_entropy"):
        reasons["torch"] = f"torch {torch.__version__} has no F.linear_cross_entropy"
    elif softcap or z_loss:
        reasons["torch"] = "it knows neither softcap nor z-loss"
    else:
        losses["torch"] = lambda hidden, head, targets: torch_loss(
            hidden, head.to(hidden.dtype), targets
        )
    if choice.device.type != "cuda":
        reasons["liger"] = "it needs a GPU"
    elif importlib.util.find_spec("liger_kernel") is None:
        reasons["liger"] = "liger-kernel is not installed"
    else:
        losses["liger"] = lambda hidden, head, targets: liger_loss(
            hidden, head.to(hidden.dtype), targets, softcap, z_loss
        )
    return losses, reasons


def random_inputs(
    model: ModelConfig, choice: DeviceChoice, rows: int = CHECKED_ROWS
) -> tuple[Tensor, Tensor, Tensor]:
    """A hidden state in the products' precision, the head as it is kept, and targets."""
    device = choice.device
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(rows, model.dim, generator=generator, device=device).to(choice.dtype)
    head = torch.randn(model.vocab_size, model.dim, generator=generator, device=device)
    targets = torch.randint(model.vocab_size, (rows,), generator=generator, device=device)
    return hidden.requires_grad_(), head.mul_(model.dim**-0.5).requires_grad_(), targets


def float64_check_inputs(
    loss: Loss, model: ModelConfig, train: TrainConfig, choice: DeviceChoice
) -> tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]:
    """A loss as a function of hidden state and head, the exact one, and inputs of a few rows: what
    is compared with float64."""
    *parts, targets = random_inputs(model, choice)
    ours, plain = under_autocast(loss, choice), plain_loss_fn(model, train)
    return (
        lambda hidden, head: ours(hidden, head, targets),
        lambda hidden, head: plain(hidden, head, targets),
        parts,
    )


def under_autocast(loss: Loss, choice: DeviceChoice) -> Loss:
    """The loss in the run's arithmetic."""
    is_mixed = choice.dtype != torch.float32
    computed: Loss = torch.autocast(choice.device.type, choice.dtype, enabled=is_mixed)(loss)
    return computed


def forward_backward(
    loss: Loss, choice: DeviceChoice, given: tuple[Tensor, Tensor, Tensor]
) -> list[Tensor]:
    """The loss and the gradients of hidden state and head, in the run's arithmetic."""
    total = under_autocast(loss, choice)(*given)
    return [total.detach(), *torch.autograd.grad(total, given[:2])]


def _seconds(model: ModelConfig, train: TrainConfig, choice: DeviceChoice, loss: Loss) -> float:
    """Seconds of the forward and the backward pass."""
    work = MOST_WORK.get(choice.device.type, MOST_WORK["cpu"])
    rows = min(max(train.batch_size, 1) * train.seq_len, MOST_ROWS)
    rows = min(rows, max(work // (6 * model.dim * model.vocab_size), CHECKED_ROWS))
    given = random_inputs(model, choice, rows)
    return candidate_seconds(lambda: forward_backward(loss, choice, given), choice.device)
