"""A step's micro-batches on their way to the device, one ahead of the work.

From ordinary memory a copy to a GPU waits until everything before it is done, and the device stands
still while the next micro-step is being launched. From pinned memory, on a stream of its own, it
runs beside the work. Rejected: copying in the loader's thread (the batches of a step that the guard
leaves out would lie on the device), and `Tensor.pin_memory`, which fills its half megabyte with a
team of all threads: 7 to 17 ms on a host of 16 cores, four times at the beginning of a step, where
the device has nothing to do yet; numpy takes 0.02 ms (docs/log.md).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foundling.model.varlen import note_count

if TYPE_CHECKING:  # a probe takes steps without the data room and its Arrow
    from foundling.data import Batch

AHEAD = 1
"""Micro-batches that are on their way while one is at work."""


class Staged(NamedTuple):
    """A micro-batch on the device."""

    inputs: Tensor
    targets: Tensor
    documents: Tensor | None


def staged(
    batches: "Sequence[Batch]", device: torch.device, *, document_mask: bool
) -> Iterator[Staged]:
    """The micro-batches in their order; the numbers of documents only where they mask."""
    if device.type != "cuda":
        for batch in batches:
            yield _moved(batch, document_mask, lambda part: torch.as_tensor(part).to(device))
        return
    waiting: deque[tuple[Staged, torch.cuda.Event]] = deque()
    for batch in batches:
        waiting.append(_sent(batch, device, document_mask))
        if len(waiting) > AHEAD:
            yield _arrived(*waiting.popleft())
    while waiting:
        yield _arrived(*waiting.popleft())


def _moved(batch: "Batch", document_mask: bool, move: Any) -> Staged:
    documents = None
    if document_mask:
        documents = move(batch.documents)
        # Each row may end with padding, which is one more.
        note_count(documents, len(batch.bounds.starts) + len(batch.inputs))
    return Staged(move(batch.inputs), move(batch.targets), documents)


def _sent(
    batch: "Batch", device: torch.device, document_mask: bool
) -> tuple[Staged, torch.cuda.Event]:
    """Begin the copies; the event is their end."""
    side = _side_stream(device)

    def move(part: NDArray[Any]) -> Tensor:
        # The allocator of pinned memory keeps a block until the copy out of it is done.
        pinned = torch.empty_like(torch.as_tensor(part), pin_memory=True)
        np.copyto(pinned.numpy(), part)
        return pinned.to(device, non_blocking=True)

    with torch.cuda.stream(side):
        found = _moved(batch, document_mask, move)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(side)
    return found, event


def _arrived(found: Staged, event: torch.cuda.Event) -> Staged:
    """Let the work wait for its copies, and the copies' memory for the work."""
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
