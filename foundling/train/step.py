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
from foundling.train.guard import Guard, RefusedStepError
from foundling.train.ledger import Ledger, Meal, count_step
from foundling.train.marks import Arriving, Mark
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


class Taken:
    """A step that is taken, or that the device has been told to take."""

    def __init__(self, state: TrainState, meal: Meal, guard: Guard | None) -> None:
        self._state, self._meal, self._guard = state, meal, guard
        self._before = state.step, state.ledger
        self._groups: dict[str, Tensor] = {}
        self._ratios: dict[str, Tensor] = {}
        self._sums: tuple[float, float] | None = None
        self._rest: Arriving | None = None
        self._result: StepResult | None = None
        self.end: Mark | None = None
        """When the device was done with it; None where the step was waited for."""

    @property
    def targets(self) -> int:
        """What the summed loss is divided by."""
        return max(self._meal.eaten.total.targets, 1)

    def judge(self, loss_sum: float, grad_norm: float) -> None:
        """Raise RefusedStepError where the guard refuses."""
        step, loss = self._before[0], loss_sum / self.targets
        if self._guard is not None:
            self._guard.check(step, loss, grad_norm)
        elif not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise RunError(
                f"step {step + 1} has loss {loss} and gradient norm {grad_norm}; the update was"
                " not taken; look at the data, or lower optim.lr."
            )
        self._sums = loss_sum, grad_norm

    def update(self, sums: Tensor, lr: float, *, measure: bool) -> None:
        """Have the optimizer make its step; `sums` are the loss and the gradients' norm."""
        state = self._state
        ratio = None
        if measure:
            self._groups = group_grad_norms(state.optimizer, state.pieces)
            ratio = UpdateRatio(state.optimizer, state.pieces)
        set_lr(state.optimizer, lr)
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        if ratio is not None:
            self._ratios = ratio.read()
        unread = [] if self._sums else list(sums)
        unread += [one.to(sums) for one in (*self._groups.values(), *self._ratios.values())]
        self._rest = Arriving(torch.stack(unread)) if unread else None
        if self._sums is None:
            self.end = Mark(state.device)
        state.step += 1
        state.ledger = state.ledger.plus(self._meal.eaten)

    def result(self) -> StepResult:
        """Its numbers, once the device is done with it. Where the guard refuses them now, the
        counters stand before the step again."""
        if self._result is None:
            self._result = self._read()
        return self._result

    def _read(self) -> StepResult:
        rest = self._rest.read() if self._rest else []
        if self._sums is None:
            loss_sum, grad_norm, *rest = rest
            try:
                self.judge(loss_sum, grad_norm)
            except RefusedStepError as refused:
                refused.was_taken = math.isfinite(loss_sum) and math.isfinite(grad_norm)
                self._state.turn_back(*self._before)
                raise
        assert self._sums is not None
        loss_sum, grad_norm = self._sums
        numbers = iter(rest)
        step, ledger = self._before
        return StepResult(
            step=step + 1,
            loss=loss_sum / self.targets,
            grad_norm=grad_norm,
            group_grad_norms=dict(zip(self._groups, numbers, strict=False)),
            update_ratios=dict(zip(self._ratios, numbers, strict=False)),
            eaten=self._meal.eaten,
            row_len=self._meal.row_len,
            total_tokens=ledger.total.tokens + self._meal.eaten.total.tokens,
        )


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
    later: bool = False,
) -> Taken:
    """Accumulate gradients over `batches`, clip, update; raises RefusedStepError, with nothing
    changed, where the guard refuses.

    With `later` nobody looks at the device now: a step that is not finite changes nothing, nor does
    any after it, until `Taken.result` raises for it; a spike is found then, and has been taken.
    """
    taken = Taken(state, count_step(_own(state, batches), sources, state.device), guard)
    sums = _gradients(state, batches, taken.targets, document_mask, clip)
    # Before the optimizer sees it: one NaN in the moments poisons every later step.
    if later:
        state.shut_unless_finite(sums)
    else:
        taken.judge(*sums.tolist())
    taken.update(sums, lr, measure=measure_update)
    if state.scaling is not None:
        state.scaling.took_a_step()
    return taken


def _own(state: TrainState, batches: "Sequence[Batch]") -> "Sequence[Batch]":
    """Tensor-parallel ranks read the same rows: one of them counts."""
    return batches if state.mesh.speaks else ()


def step_seed(seed: int, step: int, rank: int) -> int:
    """Randomness inside a step is keyed, so no generator's state has to survive a restart."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _gradients(
    state: TrainState, batches: "Sequence[Batch]", targets: int, document_mask: bool, clip: float
) -> Tensor:
    """Clipped gradients of the mean loss; the summed loss and the norm before clipping, on the
    device. In fp16, again at half the scale where they overflow."""
    while True:
        torch.manual_seed(step_seed(state.seed, state.step, state.world.rank))
        loss_sum = _accumulate(state, batches, targets, document_mask)
        loss = sum_over_ranks(loss_sum, "loss")
        state.settle_gradients()
        params = [param for _, param in state.params()]
        if state.scaling is not None:
            unscale_(params, state.scaling.value)
        # Read together: each look at the device waits for all of its work.
        sums = torch.stack((loss, clip_(params, clip, state.pieces).to(loss)))
        if state.scaling is None:
            return sums
        total, norm = sums.tolist()
        overflow = math.isfinite(total) and not math.isfinite(norm)
        if not (overflow and state.scaling.overflowed()):
            return sums
        state.optimizer.zero_grad(set_to_none=True)


def _accumulate(
    state: TrainState, batches: "Sequence[Batch]", targets: int, document_mask: bool
) -> Tensor:
    """Add up the gradients of the mean loss; returns this rank's summed loss."""
    wide = torch.float32 if state.device.type == "mps" else torch.float64  # MPS has no doubles
    total = torch.zeros((), dtype=wide, device=state.device)
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
