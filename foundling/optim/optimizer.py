"""From named parameters and the rule table to one combined optimizer."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from foundling.config.optim import OptimConfig
from foundling.optim.adamw8bit import AdamW8bit, check_rows
from foundling.optim.muon import Muon
from foundling.optim.rules import RULES, Rule, assign, with_lr_scales

# The groups carry `group` (the rule's name), `lr_scale` and torch's own `param_names`, so that a
# checkpoint can flatten the state by parameter name and the trainer can report by group.

Groups = list[dict[str, Any]]


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimConfig,
    rules: Sequence[Rule] = RULES,
    ranks: dist.ProcessGroup | None = None,
) -> torch.optim.Optimizer:
    """The optimizer that `config` names, with one group per rule that covers something.

    `ranks` are all those of the job, where there is more than one: Muon deals its work out to them.
    """
    named = dict(named_parameters)
    by_name = {rule.group: rule for rule in with_lr_scales(config, rules)}
    groups: dict[str, Groups] = {}
    for group, members in assign(named, rules).items():
        rule = by_name[group]
        who = rule.optimizer_for(config)
        if who == "adamw8bit":
            for name in members:
                check_rows(name, named[name])
        groups.setdefault(who, []).append(
            {
                "params": [(name, named[name]) for name in members],
                "group": group,
                "lr": config.lr * rule.lr_scale,
                "lr_scale": rule.lr_scale,
                "weight_decay": config.weight_decay if rule.decay else 0.0,
            }
        )
    parts = [_make(who, of_it, config, ranks) for who, of_it in groups.items()]
    return parts[0] if len(parts) == 1 else CombinedOptimizer(parts)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group the scheduled rate times its own scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def _make(
    who: str, groups: Groups, config: OptimConfig, ranks: dist.ProcessGroup | None
) -> torch.optim.Optimizer:
    betas = config.betas
    if who == "muon":
        return Muon(
            groups,
            momentum=config.momentum,
            scale=config.muon_scale,
            cautious=config.cautious_decay,
            ranks=ranks,
        )
    if who == "adamw8bit":
        return AdamW8bit(groups, betas=betas, eps=config.eps)
    params = [param for group in groups for _, param in group["params"]]
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=betas, eps=config.eps, fused=_fused(params)
    )


def _fused(parameters: Iterable[nn.Parameter]) -> bool:
    # One pass over memory instead of a dozen: 2 ms against 20 (foreach) and 25 (loop) for 3.4M
    # parameters on two CPU cores. Elsewhere (MPS, meta) torch picks its own.
    return all(
        p.device.type in ("cpu", "cuda") and p.dtype in (torch.float32, torch.float64)
        for p in parameters
    )


# Several optimizers that work on different parameters, as one.


class CombinedOptimizer(torch.optim.Optimizer):
    """Groups and state are those of the parts, so that code that sets a rate, measures a group or
    saves a moment need not know how many there are."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in self.parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of each."""
        assert closure is None
        for part in self.parts:
            part.step()


def parts_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that one is made of."""
    return optimizer.parts if isinstance(optimizer, CombinedOptimizer) else (optimizer,)


def ensure_state(optimizer: torch.optim.Optimizer) -> None:
    """Optimizers make their state at the first step; a resume needs it before."""
    for part in parts_of(optimizer):
        for group in part.param_groups:
            for param in group["params"]:
                if part.state[param]:
                    continue
                if isinstance(part, Muon | AdamW8bit):
                    part.init_state(param)
                else:
                    part.state[param] = _adamw_state(param, fused=bool(group.get("fused")))


def saved_state(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> dict[str, torch.Tensor]:
    """What has to be saved of a parameter's state, by name; the count of steps is the run's."""
    return {name: tensor for name, tensor in optimizer.state[param].items() if name != "step"}


def set_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Tell every parameter's state how many steps there have been."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(step)


def _adamw_state(param: torch.Tensor, *, fused: bool) -> dict[str, torch.Tensor]:
    device = param.device if fused else torch.device("cpu")
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        **{
            moment: torch.zeros_like(param, memory_format=torch.preserve_format)
            for moment in ("exp_avg", "exp_avg_sq")
        },
    }
