"""One optimizer step: micro-batches in, an update and its numbers out.

The loss is a sum and is divided by the global number of counted tokens, so accumulation, padding,
masks, ragged ranks and a fully masked micro-batch are all exact.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foundling.config.errors import RunError
from foundling.optim import UpdateRatio, clip_, group_grad_norms, set_lr, unscale_
from foundling.parallel import accumulating
from foundling.runtime.dist import sum_over_ranks
from foundling.runtime.pulse import collective
from foundling.train.guard import Guard
from foundling.train.ledger import Ledger, count_step
from foundling.train.staging import staged
from foundling.train.state import TrainState, autocast, hold_gradients

if TYPE_CHECKING:  # a probe takes steps without the data room and its Arrow
    from foundling.data import Batch


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did."""

    step: int
    """Completed steps, with this one."""
    loss: float
    """Mean over every counted token of the global batch, in nats."""
    grad_norm: float
    """Before clipping."""
    group_grad_norms: dict[str, float]
    """After clipping, by group of the rule table; on the logging clock."""
    update_ratios: dict[str, float]
    """Norm of the update over the norm of the weights, by group and for `all`; likewise."""
    eaten: Ledger
    row_len: float
    """Length of a row, averaged over positions."""
    total_tokens: int
    """Of all steps, with this one."""


def take_step(
    state: TrainState,
    batches: "Sequence[Batch]",
    *,
    lr: float,
    clip: float,
    sources: Sequence[str],
    document_mask: bool = False,
    measure_update: bool = False,
    guard: Guard | None = None,
) -> StepResult:
    """Accumulate gradients over `batches`, clip, update; raises RefusedStepError, with nothing
    changed, where the guard refuses.

    Rejected: judging a step when the next one has begun, so that nothing waits for two numbers;
    every optimizer then needs a gate on the device (docs/decisions).
    """
    meal = count_step(_own(state, batches), sources, state.device)
    targets = max(meal.eaten.total.targets, 1)
    loss_sum, grad_norm = _gradients(state, batches, targets, document_mask, clip)
    # Before the optimizer sees it: one NaN in the moments poisons every later step.
    _judge(state.step, loss_sum / targets, grad_norm, guard)
    groups: dict[str, Tensor] = {}
    ratios: dict[str, Tensor] = {}
    before = None
    if measure_update:
        groups = group_grad_norms(state.optimizer, state.pieces)
        before = UpdateRatio(state.optimizer, state.pieces)
    set_lr(state.optimizer, lr)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    if before is not None:
        ratios = before.read()
    numbers = _read([*groups.values(), *ratios.values()], state.device)
    state.step += 1
    state.ledger = state.ledger.plus(meal.eaten)
    if state.scaling is not None:
        state.scaling.took_a_step()
    return StepResult(
        step=state.step,
        loss=loss_sum / targets,
        grad_norm=grad_norm,
        group_grad_norms=dict(zip(groups, numbers, strict=False)),
        update_ratios=dict(zip(ratios, numbers[len(groups) :], strict=True)),
        eaten=meal.eaten,
        row_len=meal.row_len,
        total_tokens=state.ledger.total.tokens,
    )


def _judge(step: int, loss: float, grad_norm: float, guard: Guard | None) -> None:
    """Raise RefusedStepError where the guard refuses."""
    if guard is not None:
        guard.check(step, loss, grad_norm)
    elif not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise RunError(
            f"step {step + 1} has loss {loss} and gradient norm {grad_norm}; the update was"
            " not taken; look at the data, or lower optim.lr."
        )


def _read(numbers: list[Tensor], device: torch.device) -> list[float]:
    """With one look at the device."""
    if not numbers:
        return []
    wide = _wide(device)
    return [float(one) for one in torch.stack([one.to(device, wide) for one in numbers]).tolist()]


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no doubles


def _own(state: TrainState, batches: "Sequence[Batch]") -> "Sequence[Batch]":
    """Tensor-parallel ranks read the same rows: one of them counts."""
    return batches if state.mesh.speaks else ()


def step_seed(seed: int, step: int, rank: int) -> int:
    """Randomness inside a step is keyed, so no generator's state has to survive a restart."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _gradients(
    state: TrainState, batches: "Sequence[Batch]", targets: int, document_mask: bool, clip: float
) -> tuple[float, float]:
    """Clipped gradients of the mean loss; the summed loss and the norm before clipping. In fp16,
    again at half the scale where they overflow."""
    while True:
        torch.manual_seed(step_seed(state.seed, state.step, state.world.rank))
        loss_sum = _accumulate(state, batches, targets, document_mask)
        loss = sum_over_ranks(loss_sum, "loss")
        state.settle_gradients()
        params = [param for _, param in state.params()]
        if state.scaling is not None:
            unscale_(params, state.scaling.value)
        # Read together: each look at the device waits for all of its work.
        total, norm = torch.stack((loss, clip_(params, clip, state.pieces).to(loss))).tolist()
        overflow = math.isfinite(total) and not math.isfinite(norm)
        if state.scaling is None or not (overflow and state.scaling.overflowed()):
            return total, norm
        state.optimizer.zero_grad(set_to_none=True)


def _accumulate(
    state: TrainState, batches: "Sequence[Batch]", targets: int, document_mask: bool
) -> Tensor:
    """Add up the gradients of the mean loss; returns this rank's summed loss."""
    total = torch.zeros((), dtype=_wide(state.device), device=state.device)
    scale = 1.0 if state.scaling is None else state.scaling.value
    if state.model.has_graphs:
        hold_gradients(state)
    for index, rows in enumerate(staged(batches, state.device, document_mask=document_mask)):
        if state.model.has_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with accumulating(state.module, last=index == len(batches) - 1), autocast(state):
            loss_sum, _ = state.module(*rows)
            # DDP and FSDP average gradients over ranks; ours are parts of one sum.
            with collective("gradients"):
                (loss_sum * (scale * state.mesh.data.size / targets)).backward()
        total += loss_sum.detach()
    # Tensor-parallel ranks have all computed the same rows: one of them speaks for the others.
    return total if state.mesh.speaks else total.zero_()
