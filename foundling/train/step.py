"""One optimizer step: micro-batches to the device, backward passes, update; garbage collection
between steps."""

import contextlib
import gc
import hashlib
import math
from collections import deque
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foundling.config.errors import RunError
from foundling.model.kernels.attention_backends import note_count
from foundling.optim.gradients import UpdateRatio, clip_, group_grad_norms, unscale_
from foundling.optim.optimizer import set_lr
from foundling.parallel.apply import accumulating
from foundling.parallel.tensor_parallel import sum_replicated_gradients
from foundling.runtime.dist import sum_over_ranks
from foundling.runtime.progress import collective
from foundling.train.faults.anomaly import AnomalyGuard, RefusedStepError
from foundling.train.state import TrainState, allocate_gradients, autocast
from foundling.train.token_ledger import Ledger, count_step

if TYPE_CHECKING:
    from foundling.data.batch import Batch

# The loss is a sum and is divided by the global number of counted tokens, so accumulation, padding,
# masks, ragged ranks and a fully masked micro-batch are all exact.


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did."""

    step: int
    """Completed steps, with this one."""
    lr: float
    loss: float
    """Mean over every counted token of the global batch, in nats."""
    grad_norm: float
    """Before clipping."""
    group_grad_norms: dict[str, float]
    """After clipping, by group of the rule table; on the logging clock."""
    update_ratios: dict[str, float]
    """Norm of the update over the norm of the weights, by group and for `all`; likewise."""
    counts: Ledger
    row_len: float
    """Length of a row, averaged over positions."""
    total_tokens: int
    """Of all steps, with this one."""


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How a step is taken."""

    lr: float
    clip: float
    """Largest norm of the gradients; 0: any."""
    sources: Sequence[str]
    """Names that tokens are counted under."""
    document_mask: bool = False
    measure_update: bool = False
    """Whether to measure update ratios, at the cost of a copy of the weights."""


def train_step(
    state: TrainState,
    batches: "Sequence[Batch]",
    options: StepOptions,
    guard: AnomalyGuard | None = None,
) -> StepResult:
    """Accumulate gradients over `batches`, clip, update; raises RefusedStepError, with nothing
    changed, where the guard refuses.

    Rejected: judging a step when the next one has begun, so that nothing waits for two numbers;
    every optimizer then needs a gate on the device (docs/decisions).
    """
    grad_scaler = copy(state.grad_scaler)
    # Tensor-parallel ranks read the same rows: one of them counts.
    counted = batches if state.mesh.is_tp_leader else ()
    counts = count_step(counted, options.sources, state.device)
    targets = max(counts.ledger.total.targets, 1)
    loss_sum, grad_norm = _gradients(state, batches, targets, options.document_mask, options.clip)
    # Before the optimizer sees it: one NaN in the moments poisons every later step.
    try:
        _judge(state.step, loss_sum / targets, grad_norm, guard)
    except RefusedStepError:
        state.grad_scaler = grad_scaler
        raise
    groups: dict[str, Tensor] = {}
    ratios: dict[str, Tensor] = {}
    before = None
    if options.measure_update:
        groups = group_grad_norms(state.optimizer, state.fsdp1_group)
        before = UpdateRatio(state.optimizer, state.fsdp1_group)
    set_lr(state.optimizer, options.lr)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    if before is not None:
        ratios = before.read()
    numbers = _to_floats([*groups.values(), *ratios.values()], state.device)
    state.step += 1
    state.ledger = state.ledger.plus(counts.ledger)
    if state.grad_scaler is not None:
        state.grad_scaler.grow_if_stable()
    return StepResult(
        step=state.step,
        lr=options.lr,
        loss=loss_sum / targets,
        grad_norm=grad_norm,
        group_grad_norms=dict(zip(groups, numbers, strict=False)),
        update_ratios=dict(zip(ratios, numbers[len(groups) :], strict=True)),
        counts=counts.ledger,
        row_len=counts.row_len,
        total_tokens=state.ledger.total.tokens,
    )


def _judge(step: int, loss: float, grad_norm: float, guard: AnomalyGuard | None) -> None:
    """Raise RefusedStepError where the guard refuses."""
    if guard is not None:
        guard.check(step, loss, grad_norm)
    elif not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise RunError(
            f"step {step + 1} has loss {loss} and gradient norm {grad_norm}; the update was"
            " not taken; look at the data, or lower optim.lr."
        )


def _to_floats(numbers: list[Tensor], device: torch.device) -> list[float]:
    """Tensors as floats, with one synchronisation of the device."""
    if not numbers:
        return []
    dtype = _accumulator_dtype(device)
    return [float(one) for one in torch.stack([one.to(device, dtype) for one in numbers]).tolist()]


def _accumulator_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no doubles


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of a rank's random numbers in one step; derived, so that no generator state is saved."""
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
        if state.mesh.layout.tensor > 1:
            sum_replicated_gradients(state.model)
        params = [param for _, param in state.params()]
        if state.grad_scaler is not None:
            unscale_(params, state.grad_scaler.value)
        # Read together: each look at the device waits for all of its work.
        total, norm = torch.stack((loss, clip_(params, clip, state.fsdp1_group).to(loss))).tolist()
        overflow = math.isfinite(total) and not math.isfinite(norm)
        if state.grad_scaler is None or not (overflow and state.grad_scaler.back_off()):
            return total, norm
        state.optimizer.zero_grad(set_to_none=True)


def _accumulate(
    state: TrainState, batches: "Sequence[Batch]", targets: int, document_mask: bool
) -> Tensor:
    """Add up the gradients of the mean loss; returns this rank's summed loss."""
    total = torch.zeros((), dtype=_accumulator_dtype(state.device), device=state.device)
    scale = 1.0 if state.grad_scaler is None else state.grad_scaler.value
    if state.model.has_graphs:
        allocate_gradients(state)
    for index, rows in enumerate(
        prefetch_to_device(batches, state.device, document_mask=document_mask)
    ):
        if state.model.has_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with accumulating(state.module, last=index == len(batches) - 1), autocast(state):
            loss_sum, _ = state.module(*rows)
            # DDP and FSDP average gradients over ranks; ours are parts of one sum.
            with collective("gradients"):
                (loss_sum * (scale * state.mesh.data.size / targets)).backward()
        total += loss_sum.detach()
    # Tensor-parallel ranks have all computed the same rows: one of them counts.
    return total if state.mesh.is_tp_leader else total.zero_()


# Garbage collection on a clock of steps.
#
# Left to itself, Python looks through every object it has whenever enough new ones are there, in
# the middle of a step, for as long as a tenth of a second with torch loaded; on one rank of many it
# holds up all. What there is after the first step (modules, graphs, the model) is frozen out of the
# search, and the rest is looked through once in a while, at the same step on every rank.

GC_INTERVAL = 50
"""Steps between collections; few objects of a step hang in cycles at all."""


class GcControl:
    """Collects every GC_INTERVAL steps; `manual_gc` makes one."""

    def __init__(self) -> None:
        self._steps = 0

    def step(self) -> None:
        """Count a step; after the first one, what lives as long as the run is frozen."""
        if self._steps == 0:
            gc.collect()
            gc.freeze()
        self._steps += 1
        if self._steps % GC_INTERVAL == 0:
            gc.collect()


@contextlib.contextmanager
def manual_gc() -> Iterator[GcControl]:
    """Disable automatic collection inside; the yielded control collects every GC_INTERVAL steps."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield GcControl()
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


# A step's micro-batches on their way to the device, one ahead of the work.
#
# From ordinary memory a copy to a GPU waits until everything before it is done, and the device
# stands still while the next micro-step is being launched. From pinned memory, on a stream of its
# own, it overlaps with the work. Rejected: copying in the loader's thread (the batches of a step
# that the guard leaves out would lie on the device), and `Tensor.pin_memory`, which fills its half
# megabyte with a team of all threads: 7 to 17 ms on a host of 16 cores, four times at the beginning
# of a step, where the device has nothing to do yet; numpy takes 0.02 ms (docs/log.md).

PREFETCH = 1
"""Micro-batches that are on their way while one is at work."""


class DeviceBatch(NamedTuple):
    """A micro-batch on the device."""

    inputs: Tensor
    targets: Tensor
    documents: Tensor | None


def prefetch_to_device(
    batches: "Sequence[Batch]", device: torch.device, *, document_mask: bool
) -> Iterator[DeviceBatch]:
    """The micro-batches in their order; the numbers of documents only where they mask."""
    if device.type != "cuda":
        for batch in batches:
            yield _to_device(batch, document_mask, lambda part: torch.as_tensor(part).to(device))
        return
    waiting: deque[tuple[DeviceBatch, torch.cuda.Event]] = deque()
    for batch in batches:
        waiting.append(_start_copy(batch, device, document_mask))
        if len(waiting) > PREFETCH:
            yield _wait_for_copy(*waiting.popleft())
    while waiting:
        yield _wait_for_copy(*waiting.popleft())


def _to_device(batch: "Batch", document_mask: bool, move: Any) -> DeviceBatch:
    documents = None
    if document_mask:
        documents = move(batch.documents)
        # Each row may end with padding, which is one more.
        note_count(documents, len(batch.bounds.starts) + len(batch.inputs))
    return DeviceBatch(move(batch.inputs), move(batch.targets), documents)


def _start_copy(
    batch: "Batch", device: torch.device, document_mask: bool
) -> tuple[DeviceBatch, torch.cuda.Event]:
    """Start the copies of a micro-batch; the event marks their end."""
    side = _side_stream(device)

    def move(part: NDArray[Any]) -> Tensor:
        # The allocator of pinned memory keeps a block until the copy out of it is done.
        pinned = torch.empty_like(torch.as_tensor(part), pin_memory=True)
        np.copyto(pinned.numpy(), part)
        return pinned.to(device, non_blocking=True)

    with torch.cuda.stream(side):
        found = _to_device(batch, document_mask, move)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(side)
    return found, event


def _wait_for_copy(found: DeviceBatch, event: torch.cuda.Event) -> DeviceBatch:
    """Make the current stream wait for the copies, and keep their memory until it is done."""
    stream = torch.cuda.current_stream(found.inputs.device)
    stream.wait_event(event)
    for tensor in found:
        if tensor is not None:
            tensor.record_stream(stream)
    return found


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
