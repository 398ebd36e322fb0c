"""From named parameters and the rule table to a torch optimizer.

The groups carry `group` (the rule's name), `lr_scale` and torch's own `param_names`, so that a
checkpoint can flatten the state by parameter name and the trainer can report by group.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from foundling.config.sections import OptimConfig
from foundling.optim.rules import RULES, Rule, assign


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimConfig,
    rules: Sequence[Rule] = RULES,
) -> torch.optim.AdamW:
    """AdamW with one group per rule that covers something."""
    named = dict(named_parameters)
    by_name = {rule.group: rule for rule in rules}
    groups = []
    for group, members in assign(named, rules).items():
        rule = by_name[group]
        groups.append(
            {
                "params": [(name, named[name]) for name in members],
                "group": group,
                "lr": config.lr * rule.lr_scale,
                "lr_scale": rule.lr_scale,
                "weight_decay": config.weight_decay if rule.decay else 0.0,
            }
        )
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=_fused(named.values()),
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group the scheduled rate times its own scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def _fused(parameters: Iterable[nn.Parameter]) -> bool:
    # One pass over memory instead of a dozen: 2 ms against 20 (foreach) and 25 (loop) for 3.4M
    # parameters on two CPU cores. Elsewhere (MPS, meta) torch picks its own.
    return all(
        p.device.type in ("cpu", "cuda") and p.dtype in (torch.float32, torch.float64)
        for p in parameters
    )
