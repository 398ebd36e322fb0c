"""Muon (Jordan et al. 2024): momentum whose singular values are all made equal.

    m <- mu m + (1 - mu) g          n = mu m + (1 - mu) g       (Nesterov)
    w <- w - lr * decay * w - lr * scale * polar(n)

`scale` turns the polar factor, whose entries have a root mean square of 1 / sqrt(longer side), into
an update of a known size: `rms` 0.2 sqrt(longer side), the size of a typical AdamW update (Liu et
al. 2025), `spectral` sqrt(max(1, rows / columns)). Cautious decay (Liang et al. 2024) leaves
weights alone that the update pushes away from zero.

Matrices of one shape are orthogonalised together; over several ranks they are dealt out (share.py).
Rejected: torch.optim.Muon, which goes matrix by matrix in bf16 and under FSDP2 agrees with one
device only to bf16's noise.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from foundling.optim.compiled import OnCuda
from foundling.optim.polar import orthogonalise, work_dtype
from foundling.optim.share import Sharing, local

MOST = 1 << 27
"""Numbers that a rank orthogonalises at a time: about 1 GB on the way in bf16."""
MOST_MOVED = 1 << 25
"""Numbers whose update is added at a time: two more copies in fp32, 256 MB."""
_orthogonalise = OnCuda(orthogonalise)


class Muon(torch.optim.Optimizer):
    """For matrices only; `ranks` are those of the whole job, None alone."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        momentum: float,
        scale: str,
        cautious: bool,
        ranks: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.0})
        self._momentum, self._scale, self._cautious = momentum, scale, cautious
        self._ranks = ranks
        self._shared: dict[tuple[int, ...], Sharing] = {}

    def init_state(self, param: Tensor) -> None:
        """Begin with no momentum, laid out as the parameter is."""
        self.state[param]["momentum"] = torch.zeros_like(param, memory_format=torch.preserve_format)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient; collective over `ranks`."""
        assert closure is None
        for group in self.param_groups:
            shapes: dict[tuple[int, ...], list[Tensor]] = {}
            for param in group["params"]:
                shapes.setdefault(tuple(param.shape), []).append(param)
            first = 0
            for shape, params in shapes.items():
                self._update(shape, params, first, group)
                first += len(params)

    def _update(
        self, shape: tuple[int, ...], params: list[Tensor], first: int, group: dict[str, Any]
    ) -> None:
        sharing = self._sharing(params, first) if self._ranks is not None else None
        each = max(1, MOST // math.prod(shape)) * (sharing.ranks if sharing else 1)
        moved = [number for number, param in enumerate(params) if param.grad is not None]
        for start in range(0, len(moved), each):
            numbers = moved[start : start + each]
            some = [params[number] for number in numbers]
            directions = self._directions(some)
            if sharing is None:
                updates = list(_orthogonalise(torch.stack(directions)))
            else:
                stack = sharing.bring(numbers, directions)
                updates = sharing.hand_back(numbers, _orthogonalise(stack) if len(stack) else stack)
            rate = group["lr"] * update_scale(self._scale, shape)
            few = max(1, MOST_MOVED // math.prod(shape))
            for first_moved in range(0, len(some), few):
                part = slice(first_moved, first_moved + few)
                self._move(some[part], updates[part], rate, group["lr"] * group["weight_decay"])

    def _directions(self, params: list[Tensor]) -> list[Tensor]:
        """Nesterov's momentum of each, this rank's part of it, in the width and the place where it
        will be orthogonalised."""
        for param in params:
            if not self.state[param]:
                self.init_state(param)
        gradients = [local(param.grad) for param in params if param.grad is not None]
        momenta = [local(self.state[param]["momentum"]) for param in params]
        torch._foreach_lerp_(momenta, gradients, 1 - self._momentum)
        ahead = torch._foreach_lerp(gradients, momenta, self._momentum)
        device = _device(params[0])
        dtype = work_dtype(device) if params[0].dtype == torch.float32 else params[0].dtype
        directions = [torch.empty_like(one, dtype=dtype, device=device) for one in ahead]
        torch._foreach_copy_(directions, ahead)
        return directions

    def _move(self, params: list[Tensor], updates: list[Tensor], rate: float, decay: float) -> None:
        """Add the updates, many matrices at once: five launches a matrix keep Python busy, and the
        device waits for it (docs/log.md)."""
        weights = [local(param) for param in params]
        wide = [torch.empty_like(weight) for weight in weights]
        torch._foreach_copy_(wide, updates)
        if decay and self._cautious:
            decayed = torch._foreach_mul(wide, weights)
            torch._foreach_sign_(decayed)  # -1, 0 or 1, and then 0 or 1 (0, where all are zero)
            torch._foreach_clamp_max_(decayed, 0.0)
            torch._foreach_add_(decayed, 1.0)
            torch._foreach_addcmul_(weights, decayed, weights, value=-decay)
        elif decay:
            torch._foreach_mul_(weights, 1 - decay)
        torch._foreach_add_(weights, wide, alpha=-rate)

    def _sharing(self, params: list[Tensor], first: int) -> Sharing:
        shape = tuple(params[0].shape)
        if shape not in self._shared:
            assert self._ranks is not None
            self._shared[shape] = Sharing(params, first, self._ranks)
        return self._shared[shape]


def update_scale(kind: str, shape: tuple[int, ...]) -> float:
    """What a polar factor of this shape is multiplied with, besides the learning rate."""
    rows, columns = shape
    if kind == "rms":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def _device(param: Tensor) -> torch.device:
    """Where the work is done: weights that are offloaded to the host travel to the device."""
    if isinstance(param, DTensor) and param.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return param.device
