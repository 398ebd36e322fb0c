"""The learning rate as a pure function of the step: nothing to save, nothing to restore.

Steps count from 0. Warm-up rises in even steps and ends at the peak: peak * (s + 1) / warmup.
After it the rate falls in even steps of progress p, so that the very last step has exactly the
final share: p = (s - start + 1) / (total - start), where `start` is the first falling step.

    constant        no fall
    linear          1 - p
    cosine          (1 + cos(pi p)) / 2
    quarter-cosine  cos(pi p / 2)
    wsd             flat, then linear over the last `decay_share` of all steps

each scaled between the peak and `final_lr_share` of it. A run of one step takes the peak.
"""

import math
from collections.abc import Callable

from foundling.config.optim import OptimConfig
from foundling.plan.horizon import warmup_steps

_FALL: dict[str, Callable[[float], float]] = {
    "linear": lambda p: 1.0 - p,
    "cosine": lambda p: 0.5 * (1.0 + math.cos(math.pi * p)),
    "quarter-cosine": lambda p: math.cos(0.5 * math.pi * p),
    "wsd": lambda p: 1.0 - p,
}


def lr_at(step: int, total_steps: int, config: OptimConfig) -> float:
    """Learning rate of optimizer step `step` (0-based) in a run of `total_steps`."""
    warmup = warmup_steps(config, total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    falling = _falling_steps(config, total_steps)
    start = max(warmup, total_steps - falling)
    if not falling or step < start or total_steps <= 1:
        return config.lr
    if step >= total_steps - 1:  # exactly: cos(pi / 2) is 6e-17 in floating point
        return config.lr * config.final_lr_share
    progress = (step - start + 1) / (total_steps - start)
    share = config.final_lr_share
    return config.lr * (share + (1.0 - share) * _FALL[config.schedule](progress))


def _falling_steps(config: OptimConfig, total_steps: int) -> int:
    if config.schedule == "constant" or (config.schedule == "wsd" and config.decay_share == 0):
        return 0
    share = config.decay_share if config.schedule == "wsd" else 1.0
    return max(1, round(share * total_steps))
