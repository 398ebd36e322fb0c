"""From named parameters and the rule table to a torch optimizer.

The groups carry `group` (the rule's name), `lr_scale` and torch's own `param_names`, so that a
checkpoint can flatten the state by parameter name and the trainer can report by group.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from foundling.config.sections import OptimConfig
from foundling.optim.eight_bit import AdamW8bit, check_rows
from foundling.optim.mixed import Mixed
from foundling.optim.muon import Muon
from foundling.optim.rules import RULES, Rule, assign, rated

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
    by_name = {rule.group: rule for rule in rated(config, rules)}
    groups: dict[str, Groups] = {}
    for group, members in assign(named, rules).items():
        rule = by_name[group]
        who = rule.by(config)
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
    return parts[0] if len(parts) == 1 else Mixed(parts)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group the scheduled rate times its own scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def _make(
    who: str, groups: Groups, config: OptimConfig, ranks: dist.ProcessGroup | None
) -> torch.optim.Optimizer:
    betas = (config.beta1, config.beta2)
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
