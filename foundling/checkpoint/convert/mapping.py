"""Tensors that are parts of files: nothing is copied, and their pages go when they do.

Mapping a whole file instead would count as memory until its last tensor was read.
"""

import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foundling.checkpoint.tensor_index import TensorSpec
from foundling.runtime.kernel_copy import Span

_spans: dict[int, Span] = {}
"""Of the tensors that are mapped now, by their address."""


class _Memory(mmap.mmap):
    """A mapping that is forgotten when the last view of it is gone, and before its address can be
    given to somebody else: a finalizer of weakref's would come after that."""

    address = 0

    def __del__(self) -> None:
        _spans.pop(self.address, None)


def mapped(file: Path, start: int, spec: TensorSpec) -> Tensor:
    """A tensor that is a part of a file."""
    count = math.prod(spec.shape)
    if not count:
        return torch.empty(spec.shape, dtype=spec.dtype)
    before, size = start % mmap.ALLOCATIONGRANULARITY, count * spec.dtype.itemsize
    with open(file, "rb") as stream:
        # A private mapping: who writes into the tensor changes his copy and never the file.
        memory = _Memory(
            stream.fileno(), before + size, offset=start - before, access=mmap.ACCESS_COPY
        )
    if before % spec.dtype.itemsize:  # torch wants numbers where they would lie by themselves
        raw = torch.frombuffer(memory, dtype=torch.uint8, offset=before)
        return raw.clone().view(spec.dtype).view(spec.shape)
    flat = torch.frombuffer(memory, dtype=spec.dtype, count=count, offset=before)
    memory.address = flat.data_ptr()
    _spans[memory.address] = Span(file, start, size)
    return flat.view(spec.shape)


def lies(tensor: Tensor) -> Span | None:
    """The part of a file that holds a tensor's very bytes; None if it was made or changed here."""
    if not tensor.is_contiguous() or tensor.is_inference() or tensor._version:
        return None
    return _at(tensor.data_ptr(), tensor.nbytes)


def span_of(data: Any) -> Span | None:
    """The part of a file that these bytes are mapped from, if they are all of one tensor's."""
    return _at(np.frombuffer(data, np.uint8).ctypes.data, len(data))


def _at(address: int, size: int) -> Span | None:
    span = _spans.get(address)
    return span if span is not None and span.size == size else None
