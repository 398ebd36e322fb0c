"""Sizes of gradients and updates: the numbers that say why a loss stands still.

All are a few multi-tensor calls and stay on the device until read, so a step need not wait for
them. Sums run in the given order of the parameters: the same value every time.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def grad_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Euclidean norm of all gradients together; 0 when there are none."""
    return _norm([p.grad for p in parameters if p.grad is not None])


def clip_(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients in place to a norm of at most `max_norm`; the norm before is returned.

    0 only measures. A norm that is not finite makes every gradient NaN: decide before the
    optimizer sees them.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = _norm(gradients)
    if max_norm > 0 and gradients:
        # Never up: a norm of zero gives an infinite ratio, which the clamp turns into one.
        torch._foreach_mul_(gradients, (max_norm / total).clamp(max=1.0))
    return total


def group_grad_norms(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Gradient norm of each group of the rule table."""
    return {group["group"]: grad_norm(group["params"]) for group in optimizer.param_groups}


class UpdateRatio:
    """|change| / |parameters before|, per group and for `all`: made before a step, read after it.

    Costs one copy of the parameters, so it belongs on the logging clock of a large model.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
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
            changes[name] = _norm(list(torch._foreach_sub(self._groups[name], before)))
            sizes[name] = _norm(before)
        changes["all"] = torch.linalg.vector_norm(torch.stack(list(changes.values())))
        sizes["all"] = torch.linalg.vector_norm(torch.stack(list(sizes.values())))
        return {name: changes[name] / sizes[name].clamp(min=1e-12) for name in changes}


def _norm(tensors: list[Tensor]) -> Tensor:
    if not tensors:
        return torch.zeros(())
    norm: Tensor = torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm(tensors))))
    return norm
