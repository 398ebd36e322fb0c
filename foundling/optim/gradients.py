"""Sizes of gradients and updates: the numbers that say why a loss stands still.

All are a few multi-tensor calls and stay on the device until read, so a step need not wait for
them. Sums run in the given order of the parameters: the same value every time.
"""

from collections.abc import Iterable
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

Group: TypeAlias = "dist.ProcessGroup | None"
"""Ranks that each hold different pieces of the tensors, where those are plain tensors all the same
(torch's first FSDP); a DTensor knows by itself."""


def grad_norm(parameters: Iterable[nn.Parameter], pieces: Group = None) -> Tensor:
    """Euclidean norm of all gradients together; 0 when there are none."""
    return _norm([p.grad for p in parameters if p.grad is not None], pieces)


def clip_(parameters: Iterable[nn.Parameter], max_norm: float, pieces: Group = None) -> Tensor:
    """Scale the gradients in place to a norm of at most `max_norm`; the norm before is returned.

    0 only measures. A norm that is not finite makes every gradient NaN: decide before the
    optimizer sees them.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = _norm(gradients, pieces)
    if max_norm > 0 and gradients:
        # torch has no public name for operations on many tensors at once: `_foreach_*`.
        # Never up: a norm of zero gives an infinite ratio, which the clamp turns into one.
        torch._foreach_mul_(gradients, (max_norm / total).clamp(max=1.0))
    return total


def unscale_(parameters: Iterable[nn.Parameter], scale: float) -> None:
    """Divide the gradients in place by the scale of the loss."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients and scale != 1:
        torch._foreach_mul_(gradients, 1 / scale)


def group_grad_norms(optimizer: torch.optim.Optimizer, pieces: Group = None) -> dict[str, Tensor]:
    """Gradient norm of each group of the rule table."""
    return {group["group"]: grad_norm(group["params"], pieces) for group in optimizer.param_groups}


class UpdateRatio:
    """|change| / |parameters before|, per group and for `all`: made before a step, read after it.

    Costs one copy of the parameters, so it belongs on the logging clock of a large model.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, pieces: Group = None) -> None:
        self._pieces = pieces
        self._groups: dict[str, list[Tensor]] = {
            group["group"]: [p.detach() for p in group["params"]]
            for group in optimizer.param_groups
        }
        self._before = {
            name: [tensor.clone() for tensor in tensors] for name, tensors in self._groups.items()
        }

    def read(self) -> dict[str, Tensor]:
        """The ratios of what has happened since this was made."""
        changes, sizes = {}, {}
        for name, before in self._before.items():
            moved = list(torch._foreach_sub(self._groups[name], before))
            changes[name] = _norm(moved, self._pieces)
            sizes[name] = _norm(before, self._pieces)
        changes["all"] = torch.linalg.vector_norm(torch.stack(list(changes.values())))
        sizes["all"] = torch.linalg.vector_norm(torch.stack(list(sizes.values())))
        return {name: changes[name] / sizes[name].clamp(min=1e-12) for name in changes}


def _norm(tensors: list[Tensor], pieces: Group = None) -> Tensor:
    if pieces is not None:
        return _norm_of_pieces(tensors, pieces)
    if not tensors:
        return torch.zeros(())
    if any(isinstance(tensor, DTensor) for tensor in tensors):
        return _norm_of_parts(tensors)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm(tensors))))
    return norm


def _norm_of_pieces(tensors: list[Tensor], pieces: dist.ProcessGroup) -> Tensor:
    """The same where every rank of a group holds other pieces, or none. Collective."""
    total = torch.zeros((), dtype=torch.float64)
    if tensors:
        norms = torch.stack(list(torch._foreach_norm(tensors))).double()
        total = norms.square().sum()
    device = torch.device("cuda") if dist.get_backend(pieces) == "nccl" else torch.device("cpu")
    total = total.to(device)
    dist.all_reduce(total, group=pieces)
    return total.sqrt().float()


def _norm_of_parts(tensors: list[Tensor]) -> Tensor:
    """The same over tensors of which each rank holds a part: squares of the own parts, each divided
    by the ranks that hold the same, summed over the mesh. Collective."""
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    mesh = next(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
    shares = [_share(tensor, mesh) for tensor in tensors]
    norms = torch.stack(list(torch._foreach_norm(parts))).double()
    weights = torch.tensor(shares, dtype=norms.dtype, device=norms.device)
    total = (norms.square() * weights).sum().to(mesh.device_type)
    for axis in range(mesh.ndim):
        dist.all_reduce(total, group=mesh.get_group(axis))
    return total.sqrt().float()


def _share(tensor: Tensor, mesh: DeviceMesh) -> float:
    """One over the number of ranks of `mesh` that hold the same part."""
    if not isinstance(tensor, DTensor):
        return 1 / mesh.size()
    same = 1
    for axis, placement in enumerate(tensor.placements):
        same *= tensor.device_mesh.size(axis) if placement.is_replicate() else 1
    return 1 / same
