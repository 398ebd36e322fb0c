"""How gradients become updates: one rule table, AdamW, Muon, schedules as pure functions."""

from foundling.optim.build import build_optimizer, set_lr
from foundling.optim.measure import UpdateRatio, clip_, grad_norm, group_grad_norms, unscale_
from foundling.optim.mixed import ensure_state, kept, set_step
from foundling.optim.rules import RULES, Rule, assign
from foundling.optim.schedule import lr_at

__all__ = [
    "RULES",
    "Rule",
    "UpdateRatio",
    "assign",
    "build_optimizer",
    "clip_",
    "ensure_state",
    "grad_norm",
    "group_grad_norms",
    "kept",
    "lr_at",
    "set_lr",
    "set_step",
    "unscale_",
]
