"""Which way to compute the head's cross-entropy: found by launching each at the run's own width and
vocabulary, where `train.kernels.loss` is auto.

Ours, torch's and liger's never hold the whole logits; plain ones do, and are only for comparison.
Each is held to float64 on a few rows first: a loss whose gradients are zeros is the fastest of all.
"""

import importlib.util
import time
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from foundling.config.model import ModelConfig
from foundling.config.parallel import ParallelConfig
from foundling.config.train import TrainConfig
from foundling.model.loss import cross_entropy_sum, widen
from foundling.parallel.losses import liger_loss, plain_loss, torch_loss
from foundling.runtime.console import first_line
from foundling.runtime.device import DeviceChoice, synchronise
from foundling.train.autotune.harness import TOLERANCE, worst_gap

ROUNDS = 3
CHECKED_ROWS = 32
MOST_ROWS = 16384
"""That are timed: more than one of our chunks."""
MOST_WORK = {"cuda": 10**15, "cpu": 10**10}
"""FLOP of both passes: a tenth of a second of two cores, and of a GPU more than all the rows."""
LossName = Literal["fused", "torch", "liger"]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Hidden [N, C], head [V, C] and targets [N] to the summed loss."""


def choose_loss(
    model: ModelConfig, train: TrainConfig, parallel: ParallelConfig, choice: DeviceChoice
) -> tuple[str, str]:
    """The loss to use, and a line about it where there was a choice."""
    if train.kernels.loss != "auto":
        return train.kernels.loss, ""
    name, why = _chosen(model, train, parallel, choice)
    return name, f"loss {name} ({why})"


def _chosen(
    model: ModelConfig, train: TrainConfig, parallel: ParallelConfig, choice: DeviceChoice
) -> tuple[LossName, str]:
    losses, reasons = available_losses(model, train, parallel, choice)
    if len(losses) == 1:
        return "fused", "; ".join(f"no {name}: {reason}" for name, reason in reasons.items())
    if torch.are_deterministic_algorithms_enabled():
        return "fused", "deterministic runs are not chosen by a clock"
    seconds: dict[LossName, float] = {}
    exact = exact_forward_backward(model, train, choice)
    for name, loss in losses.items():
        try:
            gap = worst_gap(forward_backward(loss, choice, random_inputs(model, choice)), exact)
            if not gap <= TOLERANCE:
                reasons[name] = f"wrong by {gap:.1e} of the norm"
                continue
            seconds[name] = _seconds(model, train, choice, loss)
        except Exception as error:  # whatever a kernel that does not fit throws
            reasons[name] = first_line(error)
    if choice.device.type == "cuda":
        torch.cuda.empty_cache()
    refused = "".join(f"; {name}: {reason}" for name, reason in reasons.items())
    if "fused" not in seconds:  # it has a plain form on every device
        return "fused", f"WARNING: it could not be timed{refused}"
    order = sorted(seconds, key=lambda name: seconds[name])
    times = ", ".join(f"{name} {1e3 * seconds[name]:.2f} ms" for name in order)
    return order[0], f"launched: {times}{refused}"


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
) -> tuple[dict[LossName, Loss], dict[LossName, str]]:
    """The losses that this model and device allow, and the reasons against the others."""
    softcap, z_loss = model.logit_softcap, train.z_loss
    float8 = train.head_float8
    losses: dict[LossName, Loss] = {
        "fused": lambda hidden, head, targets: cross_entropy_sum(
            hidden, head, targets, softcap, z_loss, float8
        )[0]
    }
    reasons: dict[LossName, str] = {}
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


def forward_backward(
    loss: Loss, choice: DeviceChoice, given: tuple[Tensor, Tensor, Tensor]
) -> list[Tensor]:
    """The loss and the gradients of hidden state and head, in the run's arithmetic."""
    mixed = choice.dtype != torch.float32
    with torch.autocast(choice.device.type, choice.dtype, enabled=mixed):
        total = loss(*given)
    return [total.detach(), *torch.autograd.grad(total, given[:2])]


def exact_forward_backward(
    model: ModelConfig, train: TrainConfig, choice: DeviceChoice
) -> list[Tensor]:
    """The loss of the checked rows and both gradients, of whole logits in float64."""
    *parts, targets = random_inputs(model, choice)
    hidden, head = (part.detach().double().requires_grad_() for part in parts)
    total = plain_loss_fn(model, train)(hidden, head, targets)
    return [total.detach(), *torch.autograd.grad(total, (hidden, head))]


def _seconds(model: ModelConfig, train: TrainConfig, choice: DeviceChoice, loss: Loss) -> float:
    """Of both passes: the fastest of some rounds after one that warms up."""
    work = MOST_WORK.get(choice.device.type, MOST_WORK["cpu"])
    rows = min(max(train.batch_size, 1) * train.seq_len, MOST_ROWS)
    rows = min(rows, max(work // (6 * model.dim * model.vocab_size), CHECKED_ROWS))
    given = random_inputs(model, choice, rows)
    times = []
    for _ in range(ROUNDS + 1):
        synchronise(choice.device)
        began = time.perf_counter()
        forward_backward(loss, choice, given)
        synchronise(choice.device)
        times.append(time.perf_counter() - began)
    return min(times[1:])
