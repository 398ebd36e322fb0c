"""One tensor as an archive of torch's, at a place of a file where its numbers can be used.

torch places numbers evenly within its archive. Here the archive is placed evenly within the file,
too, or every reader would have to copy a tensor before it can map it. Nothing is asked of a reader
for this: an index names the place of each archive, and between two of them are zeros.
"""

import io
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from foundling.runtime.kernel_copy import LARGE, PAGE
from foundling.runtime.packing import ALIGNED


class Stream(Protocol):
    """A file that is written from its beginning to its end."""

    def write(self, data: Any, /) -> int:
        """Add bytes."""

    def tell(self) -> int:
        """How many there are."""


def save_tensor(tensor: Tensor, stream: Stream) -> tuple[int, int]:
    """Write an archive, and say where it begins and how long it is."""
    gap = -stream.tell() % ALIGNED
    if tensor.nbytes >= LARGE:
        gap = -(stream.tell() + _head_bytes(tensor.dtype, tuple(tensor.shape))) % PAGE
    if gap:
        stream.write(bytes(gap))
    start = stream.tell()
    torch.save(tensor, stream)  # type: ignore[arg-type]
    return start, stream.tell() - start


@lru_cache(maxsize=1024)
def _head_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Where in its archive torch puts the numbers of such a tensor; layers are alike."""
    rehearsal = _Rehearsal()
    torch.save(torch.empty(shape, dtype=dtype), rehearsal)  # type: ignore[arg-type]
    return rehearsal.head


class _Rehearsal(io.RawIOBase):
    """Keeps nothing of an archive but where its numbers would begin."""

    def __init__(self) -> None:
        self.head = self._size = 0

    def write(self, data: Any, /) -> int:
        if len(data) >= LARGE:
            self.head = self._size
        self._size += len(data)
        return len(data)

    def writable(self) -> bool:
        return True
