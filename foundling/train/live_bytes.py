"""Bytes of tensors alive on a CPU, as CUDA's allocator would count them, with their peak.

Sees every tensor that an operator returns, through torch's dispatcher, and forgets its storage when
it dies: exact for weights, gradients, moments and kept activations, blind to scratch space inside a
kernel. Rejected: the process's resident size (pages come late and go later, if ever) and the bytes
that autograd saves (per-op recompute keeps its results elsewhere, and saved weights are no extra).
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered: `now` and `peak`, in bytes. Tensors that were there before are passed in."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}
        for tensor in tensors:
            self._meet(tensor)

    def forget_peak(self) -> None:
        """Start a new peak."""
        self.peak = self.now

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                self._meet(leaf)
        return out

    def _meet(self, tensor: Tensor) -> None:
        storage: torch.UntypedStorage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def gone(_: object) -> None:
            if self._alive.pop(key, None) is not None:
                self.now -= size

        self._alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)
