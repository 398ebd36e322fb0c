"""torch's own attention backends as kernels that can be launched one by one.

Stands in for `foundling.model.kernels`, which has more of them and is taken where it is there.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

KNOWN = "foundling.model.kernels"


@dataclass(frozen=True)
class MaskSpec:
    """What a query may see: never a later key; only its document's; only so far back."""

    documents: Tensor | None = None
    """[B, T] numbers."""
    window: int = 0


class Kernel(Protocol):
    """A way to attend."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: Any) -> Tensor:
        """q [B, H, T, D], k and v [B, K, T, D] to [B, H, T, D]."""

    def refusal(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, spec: Any
    ) -> str | None:
        """Why it cannot; None if it may be tried."""


class Sdpa:
    """One backend of scaled_dot_product_attention."""

    def __init__(self, backend: SDPBackend, *, cuda: bool, masks: bool, grouped: bool) -> None:
        self.backend, self.cuda, self.masks, self.grouped = backend, cuda, masks, grouped

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: MaskSpec) -> Tensor:
        """With a mask only where causality does not say it all."""
        mask = allowed(spec, q.shape[2], q.device)
        groups = q.shape[1] // k.shape[1]
        if groups > 1 and not self.grouped:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        with sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=groups > 1 and self.grouped,
            )

    def refusal(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, spec: MaskSpec
    ) -> str | None:
        """What is known beforehand; the rest is found out by launching."""
        if self.cuda and device.type != "cuda":
            return "needs CUDA"
        if not self.masks and (spec.documents is not None or spec.window):
            return "takes no mask"
        return None


KERNELS: dict[str, Kernel] = {
    "cudnn": Sdpa(SDPBackend.CUDNN_ATTENTION, cuda=True, masks=False, grouped=True),
    "flash": Sdpa(SDPBackend.FLASH_ATTENTION, cuda=False, masks=False, grouped=True),
    "efficient": Sdpa(SDPBackend.EFFICIENT_ATTENTION, cuda=True, masks=True, grouped=False),
    "math": Sdpa(SDPBackend.MATH, cuda=False, masks=True, grouped=True),
}


def known_kernels() -> tuple[Mapping[str, Kernel], Any]:
    """The kernels there are, and the class of the masks that they take."""
    if importlib.util.find_spec(KNOWN) is None:
        return KERNELS, MaskSpec
    found: Any = importlib.import_module(KNOWN)
    return found.KERNELS, found.MaskSpec


def allowed(spec: MaskSpec, width: int, device: torch.device) -> Tensor | None:
    """True where a query may look, [B or 1, 1, T, T]; None: plain causality."""
    if spec.documents is None and not spec.window:
        return None
    places = torch.arange(width, device=device)
    distance = places[:, None] - places
    mask = distance >= 0
    if spec.window:
        mask = mask & (distance < spec.window)
    mask = mask[None, None]
    if spec.documents is not None:
        numbers = spec.documents
        mask = mask & (numbers[:, None, :, None] == numbers[:, None, None, :])
    return mask
