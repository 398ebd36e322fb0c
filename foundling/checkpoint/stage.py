"""Host memory that a save is copied into: training may change the tensors as soon as it is full.

One block, kept between saves, because memory that is asked for anew costs a page fault every four
kilobytes; in huge pages where the system has them, and touched by all threads at once. For tensors
on a GPU it is locked in place, which makes the copy several times faster; it is registered and not
allocated as pinned memory, since torch rounds those blocks up to a power of two.
"""

import contextlib
import math
import mmap
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from foundling.runtime import points, warn

K = TypeVar("K")
ALIGN = 512


class Stage:
    """The block, and how tensors lie in it."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._is_locked = False

    def reserve(self, parts: Mapping[K, Tensor]) -> None:
        """Have room for these parts; the first save would otherwise wait seconds for it."""
        _, size = _layout(parts)
        if size > len(self._block):
            self._renew(size, locked=_gpu_of(parts) is not None)

    def fill(self, parts: Mapping[K, Tensor]) -> dict[K, Tensor]:
        """Copy every part; on return nothing of it hangs on the originals."""
        self.reserve(parts)
        starts, _ = _layout(parts)
        on_gpu = _gpu_of(parts)
        copies: dict[K, Tensor] = {}
        for key, part in parts.items():
            points.at("stage")
            copies[key] = self._room(starts[key], part)
            copies[key].copy_(part, non_blocking=self._is_locked)
        if on_gpu is not None:
            torch.cuda.current_stream(on_gpu).synchronize()
        return copies

    def release(self) -> None:
        """Give the memory back."""
        if self._is_locked:
            _cudart().cudaHostUnregister(self._block.data_ptr())
        self._block, self._is_locked = torch.empty(0, dtype=torch.uint8), False

    def _renew(self, size: int, *, locked: bool) -> None:
        self.release()
        self._block = _memory(size)
        if locked:
            self._is_locked = not int(_cudart().cudaHostRegister(self._block.data_ptr(), size, 0))
            if not self._is_locked:
                _forget_error()
                warn(
                    f"{size / 2**30:.1f} GiB of memory could not be locked for saving, so each"
                    " save stops training for longer; see `ulimit -l`."
                )

    def _room(self, start: int, part: Tensor) -> Tensor:
        """A tensor with a storage of exactly its size: torch.save writes whole storages."""
        if not part.numel():
            return torch.empty(part.shape, dtype=part.dtype)
        flat = torch.frombuffer(
            self._block.numpy(), dtype=part.dtype, count=part.numel(), offset=start
        )
        return flat.view(part.shape)


def _gpu_of(parts: Mapping[K, Tensor]) -> torch.device | None:
    return next((part.device for part in parts.values() if part.device.type == "cuda"), None)


def _memory(size: int) -> Tensor:
    """Bytes that are there already, not only promised."""
    pages = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).zero_()


def _layout(parts: Mapping[K, Tensor]) -> tuple[dict[K, int], int]:
    """Where each part begins, and the size of all."""
    starts: dict[K, int] = {}
    end = 0
    for key, part in parts.items():
        starts[key] = end
        end += math.ceil(part.numel() * part.element_size() / ALIGN) * ALIGN
    return starts, end


def _forget_error() -> None:
    """CUDA keeps a refusal until somebody asks, and the next kernel of the training would be blamed
    for it; this one takes the blame."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
