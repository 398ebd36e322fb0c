"""Which blocks forget their activations in the forward pass: the meaning of `parallel.recompute`.

    none      every block keeps what its backward pass needs
    every-N   the N-th, 2N-th, ... block keeps only its input and is run again in the backward pass
    all       every block does (the same as every-1)
    per-op    every block keeps the results of its matrix products and of attention, and makes the
              cheap rest (norms, rotations, activations) again
    ffn       every block makes its feed-forward half again, whose tensors are the widest; compiled,
              the norm before attention as well
    budget-S  the compiler keeps the share S (such as 0.5) of what a block would keep, choosing what
              is cheapest to make again; needs train.compile
    auto      `foundling plan` and `foundling config` pick one of these

Here and not in `parallel`, because the plan counts the same blocks without torch.
"""

import re

from foundling.config.errors import ConfigError

AUTO = "auto"
POLICIES = ("none", "per-op", "ffn", "all")


def recomputed_blocks(policy: str, layers: int) -> tuple[int, ...]:
    """Indices of the blocks that are run again in the backward pass, wholly or in part."""
    every = recompute_interval(policy)
    return tuple(range(every - 1, layers, every)) if every else ()


def recompute_interval(policy: str) -> int:
    """N of every-N: 1 for what every block does, 0 for `none`."""
    if kept_share(policy) is not None:
        return 1
    if policy in POLICIES:
        return 0 if policy == "none" else 1
    match = re.fullmatch(r"every-([1-9]\d*)", policy)
    if not match:
        raise ConfigError(
            f"parallel.recompute must be none, every-N (such as every-2), all, per-op, ffn or"
            f" budget-S (such as budget-0.5), not {policy!r}."
        )
    return int(match[1])


def kept_share(policy: str) -> float | None:
    """S of budget-S, between 0 and 1; None for other policies."""
    match = re.fullmatch(r"budget-(0?\.\d+)", policy)
    return float(match[1]) if match else None


def check_recompute(policy: str, layers: int) -> None:
    """Refuse a policy that is none, or that would recompute nothing."""
    if policy == AUTO:
        return
    every = recompute_interval(policy)
    if every > layers:
        raise ConfigError(
            f"parallel.recompute {policy} has no effect on a model of {layers} layers;"
            f" use every-{layers} or less, or none."
        )
