"""Recompute: blocks that drop their activations and run again in the backward pass.

A block's `forward` is replaced and the block is not wrapped, so parameter names, and with them
checkpoints and the optimizer's table, know nothing of it. Rejected: torch's CheckpointWrapper
(renames every parameter), re-entrant checkpointing (no gradients by keyword, breaks under DDP), and
saving batched products under per-op: they only occur inside attention's fallback, where keeping
them would keep the scores of every pair of positions.
"""

import importlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from foundling.config.errors import ConfigError
from foundling.config.recompute import AUTO, kept_share, recomputed_blocks

SAVED_OPS = (
    "mm",
    "addmm",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
)
"""Operators whose results per-op keeps: what costs time. A torch that lacks one goes without."""


def apply_recompute(blocks: nn.ModuleList, policy: str, *, compiled: bool = False) -> None:
    """Make the blocks that `policy` names run again in the backward pass; `compiled` says whether a
    compiler will see them."""
    if policy == AUTO:
        raise ConfigError(
            "parallel.recompute auto has not been decided yet; `foundling plan` says what fits."
        )
    share = kept_share(policy)
    if share is not None and not compiled:
        raise ConfigError(
            f"parallel.recompute {policy} is the compiler's work and nothing is compiled here; use"
            " train.compile blocks, or per-op."
        )
    _set_budget(1.0 if share is None else share)
    if share is not None:
        return
    keep = _saved_ops() if policy == "per-op" else []
    part = "feed" if policy == "ffn" else "forward"
    for index in recomputed_blocks(policy, len(blocks)):
        setattr(blocks[index], part, _recomputed(getattr(blocks[index], part), keep))


def _set_budget(share: float) -> None:
    """The compiler's budget is the process's: a model built later must not inherit this one's."""
    name = "torch._functorch.config"
    if share == 1.0 and name not in sys.modules:
        return  # seconds of import, which other policies do not pay
    importlib.import_module(name).activation_memory_budget = share  # type: ignore[attr-defined]


def _recomputed(forward: Callable[..., Tensor], keep: list[Any]) -> Callable[..., Tensor]:
    options: dict[str, Any] = {}
    if keep:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep)

    def again(*args: Any, **kwargs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # The generator's state is kept too: dropout must drop the same elements the second time.
        out: Tensor = checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=True, **options, **kwargs
        )
        return out

    return again


def _saved_ops() -> list[Any]:
    found = [getattr(torch.ops.aten, name, None) for name in SAVED_OPS]
    return [op.default for op in found if op is not None]
