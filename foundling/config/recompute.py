"""Which blocks forget their activations in the forward pass: the meaning of `parallel.recompute`.

    none      every block keeps what its backward pass needs
    every-N   the N-th, 2N-th, ... block keeps only its input and is run again in the backward pass
    all       every block does (the same as every-1)
    per-op    every block keeps the results of its matrix products and of attention, and makes the
              cheap rest (norms, rotations, activations) again
    auto      `foundling plan` and `foundling config` pick one of these

Here and not in `parallel`, because the plan counts the same blocks without torch.
"""

import re

from foundling.config.errors import ConfigError

AUTO = "auto"
POLICIES = ("none", "per-op", "all")


def recomputed_blocks(policy: str, layers: int) -> tuple[int, ...]:
    """Indices of the blocks that are run again in the backward pass, wholly or in part."""
    every = recompute_interval(policy)
    return tuple(range(every - 1, layers, every)) if every else ()


def recompute_interval(policy: str) -> int:
    """N of every-N: 1 for `all` and `per-op`, 0 for `none`."""
    if policy in POLICIES:
        return 0 if policy == "none" else 1
    match = re.fullmatch(r"every-([1-9]\d*)", policy)
    if not match:
        raise ConfigError(
            f"parallel.recompute must be none, every-N (such as every-2), all or per-op,"
            f" not {policy!r}."
        )
    return int(match[1])


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
