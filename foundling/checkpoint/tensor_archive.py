"""One tensor as an archive of torch's, at a place of a file where its numbers can be used.

torch places numbers evenly within its archive. Here the archive is placed evenly within the file,
too, or every reader would have to copy a tensor before it can use it. Nothing is asked of a reader
for this: an index names the place of each archive, and between two of them are zeros.
"""

import io
from typing import Any, Protocol

import torch
from torch import Tensor

from foundling.runtime.kernel_copy import LARGE, evenness

_heads: dict[tuple[object, ...], int] = {}
"""Bytes before the numbers in archives of tensors that were met; layers are alike."""


class Stream(Protocol):
    """A file that is written from its beginning to its end."""

    def write(self, data: Any, /) -> int:
        """Add bytes."""

    def tell(self) -> int:
        """How many there are."""


def save_tensor(tensor: Tensor, stream: Stream) -> tuple[int, int]:
    """Write an archive, and say where it begins and how long it is."""
    # torch's own places are multiples of 64; a page has to be aimed at.
    head = _head_bytes(tensor) if tensor.nbytes >= LARGE else 0
    gap = -(stream.tell() + head) % evenness(tensor.nbytes)
    if gap:
        stream.write(bytes(gap))
    start = stream.tell()
    torch.save(tensor, stream)  # type: ignore[arg-type]
    return start, stream.tell() - start


def _head_bytes(tensor: Tensor) -> int:
    """Where in its archive torch puts a tensor's numbers."""
    alike = (tensor.dtype, tuple(tensor.shape), tensor.stride())
    if alike not in _heads:
        rehearsal = _Rehearsal()
        torch.save(tensor, rehearsal)  # type: ignore[arg-type]
        _heads[alike] = rehearsal.head
    return _heads[alike]


class _Rehearsal(io.RawIOBase):
    """Keeps nothing of an archive but what came before its longest part, the numbers."""

    def __init__(self) -> None:
        self.head = self._size = self._longest = 0

    def write(self, data: Any, /) -> int:
        if len(data) > self._longest:
            self.head, self._longest = self._size, len(data)
        self._size += len(data)
        return len(data)

    def writable(self) -> bool:
        return True
