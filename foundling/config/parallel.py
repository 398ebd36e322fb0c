"""Section `parallel`: degrees of each kind of parallelism, recompute, and what fits a model."""

import re
from typing import ClassVar, Literal, Self

from pydantic import NonNegativeInt, PositiveInt, model_validator

from foundling.config.base import Section
from foundling.config.errors import ConfigError
from foundling.config.model import ModelConfig


def tensor_parallel_problem(model: ModelConfig, degree: int) -> str:
    """Why a model cannot be split into `degree` parts, as a sentence; empty where it can.

    Heads, key-value heads and the feed-forward's width must divide; the vocabulary need not, its
    last part is filled up.
    """
    if degree == 1:
        return ""
    sizes = {
        "model.heads": model.heads,
        "model.kv_heads": model.num_kv_heads,
        "model.ffn_dim": model.ffn_dim,
    }
    for name, size in sizes.items():
        if size % degree:
            return (
                f"parallel.tensor is {degree} and {name} is {size}, which it does not divide;"
                " choose a degree that does."
            )
    lacking = {
        f"model.positions {model.positions}": model.positions != "rotary",
        "model.value_embeds": model.value_embeds,
        "model.residual_scales": model.residual_scales,
        "model.dropout": model.dropout > 0,
    }
    for name in (name for name, is_set in lacking.items() if is_set):
        return f"{name} is not built for parallel.tensor {degree}; use parallel.shard instead."
    return ""


def check_tensor(model: ModelConfig, degree: int) -> None:
    """Refuse a model that cannot be split into `degree` parts."""
    if problem := tensor_parallel_problem(model, degree):
        raise ConfigError(problem)


class ParallelConfig(Section):
    """How the work is laid out over processes."""

    section_name: ClassVar[str] = "parallel"

    replicate: NonNegativeInt = 0
    """Data-parallel replicas (DDP); 0 means every process of the job."""
    shard: PositiveInt = 1
    """Fully sharded data parallel degree (FSDP)."""
    tensor: PositiveInt = 1
    """Tensor parallel degree."""
    fsdp1: bool = False
    """Shard with torch's first FSDP instead of the second: for comparison with old runs."""
    reshard: bool = True
    """FSDP: give a block's gathered weights back after its forward pass and gather them again; off
    costs memory and saves traffic."""
    param_dtype: Literal["fp32", "bf16"] = "fp32"
    """FSDP: how weights travel. fp32 computes as one device does; bf16 halves the traffic and
    rounds the norms' weights too."""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """How gradients travel between ranks; 16 bits halve the traffic and round each rank's part."""
    offload: bool = False
    """FSDP: keep weights and optimizer state in the host's memory."""
    recompute: str = "none"
    """Activations recomputed in the backward pass to save memory: none, every-N (every N-th block),
    all, per-op (all but matrix products and attention), ffn (the feed-forward halves), or budget-S
    (what the compiler chooses to keep the share S, with train.compile)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse what has no effect without shards."""
        if self.shard == 1:
            for name in ("fsdp1", "reshard", "param_dtype", "offload"):
                self.refuse_unused(name, "without shards", "parallel.shard")
        if self.fsdp1 and self.tensor > 1:
            raise ConfigError(
                "parallel.fsdp1 is for comparison and knows no parallel.tensor; leave one of them"
                " out."
            )
        return self


# Which blocks forget their activations in the forward pass: the meaning of `parallel.recompute`.
#
# every-N and all: such a block keeps its input alone. per-op: it keeps the results of its products
# and of attention. ffn: its feed-forward half is made again, whose tensors are the widest
# (compiled, the norm before attention too). budget-S: the compiler keeps the share S, choosing what
# is cheapest to make again. auto: `foundling plan` picks one. Here, because the plan counts the
# same blocks.

AUTO = "auto"
POLICIES = ("none", "per-op", "ffn", "all")


def recomputed_blocks(policy: str, layers: int) -> tuple[int, ...]:
    """Indices of the blocks that are recomputed in the backward pass, wholly or in part."""
    every = recompute_interval(policy)
    return tuple(range(every - 1, layers, every)) if every else ()


def recompute_interval(policy: str) -> int:
    """N of every-N: 1 for what every block does, 0 for `none`."""
    if budget_share(policy) is not None:
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


def budget_share(policy: str) -> float | None:
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
