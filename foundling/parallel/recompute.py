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
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from foundling.config.errors import ConfigError
from foundling.config.parallel import AUTO, budget_share, recomputed_blocks

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

CHEAP_AGAIN = ("per-op", "ffn")
"""Policies whose compiled blocks do not keep products' cheap inputs (normed streams): all there is
to per-op, and under ffn 8.6 GB more of the 1.24B model's 64 rows."""


def apply_recompute(blocks: nn.ModuleList, policy: str, *, compiled: bool = False) -> None:
    """Make the blocks that `policy` names run again in the backward pass; `compiled` says whether a
    compiler will see them."""
    if policy == AUTO:
        raise ConfigError(
            "parallel.recompute auto has not been decided yet; `foundling plan` says what fits."
        )
    share = budget_share(policy)
    if share is not None and not compiled:
        raise ConfigError(
            f"parallel.recompute {policy} is the compiler's work and nothing is compiled here; use"
            " train.compile blocks, or per-op."
        )
    cheap_again = compiled and policy in CHEAP_AGAIN
    _tell_compiler(1.0 if share is None else share, keep_inputs=not cheap_again)
    if share is not None or (compiled and policy == "per-op"):
        return
    keep = _saved_ops() if policy == "per-op" else []
    part = "feed" if policy == "ffn" else "forward"
    for index in recomputed_blocks(policy, len(blocks)):
        setattr(blocks[index], part, _recomputed(getattr(blocks[index], part), keep))


def _tell_compiler(share: float, *, keep_inputs: bool) -> None:
    """What compiled blocks keep: the share of a budget, and whether a product's input that is cheap
    to make is kept all the same (the compiler's own habit).

    per-op is the compiler's without that habit: as little memory as marking every operator, which
    only hinders its fusions (1.24B, 60 rows on an H200: 125.5 GB either way, 70.6k against 69.8k
    tokens/s). Both settings are the process's: a model built later must not inherit this one's.
    """
    name = "torch._functorch.config"
    if share == 1.0 and keep_inputs and name not in sys.modules:
        return  # seconds of import, which other policies do not need
    config: Any = importlib.import_module(name)
    if share < 1.0:
        _weigh_products(config)
    before = (config.activation_memory_budget, config.ban_recompute_materialized_backward)
    config.activation_memory_budget = share
    config.ban_recompute_materialized_backward = keep_inputs
    if before != (share, keep_inputs) and "torch._dynamo" in sys.modules:
        # Torch's caches on disk are keyed by both, its graphs of this process are not.
        sys.modules["torch._dynamo"].reset()


@lru_cache
def _weigh_products(config: Any) -> None:
    """Tell the compiler's budget what our own operators cost: it takes one that it does not know
    for free, and would make the widest tensor of a block again. And what attention costs whose
    queries share keys, which torch before 2.13 refuses to count."""
    from torch.utils.flop_counter import flop_registry, shape_wrapper

    from foundling.model.kernels.cudnn_band import band
    from foundling.model.kernels.flash4 import flash4
    from foundling.model.mlp import relu2_matmul

    def product(x: list[int], weight: list[int], *_: Any, **__: Any) -> int:
        return 2 * x[0] * x[1] * weight[0]

    def attention(q: list[int], k: list[int], v: list[int], *_: Any, **__: Any) -> int:
        rows, heads, queries, width = q
        return 2 * rows * heads * queries * k[2] * (width + v[3])

    def inside_window(q: list[int], k: list[int], v: list[int], window: int, **__: Any) -> int:
        return attention(q, [*k[:2], min(window, k[2]), k[3]], v)

    def flash(
        q: list[int], k: list[int], v: list[int], _: object, width: int, window: int, **__: Any
    ) -> int:
        *positions, heads, depth = q  # in rows, or laid end to end
        return 2 * prod(positions) * heads * min(width, window or width) * (depth + v[-1])

    # Operators are named by what the compiler sees; attention's own names are all private.
    aten = torch.ops.aten
    weighed: dict[Any, Callable[..., int]] = {
        relu2_matmul._opoverload.overloadpacket: product,
        band._opoverload.overloadpacket: inside_window,
        flash4._opoverload.overloadpacket: flash,
        aten._scaled_dot_product_flash_attention: attention,
        aten._scaled_dot_product_cudnn_attention: attention,
        aten._scaled_dot_product_efficient_attention: attention,
    }
    for op, flops in weighed.items():
        flop_registry[op] = shape_wrapper(flops)  # type: ignore[no-untyped-call]
    if hasattr(config, "is_non_builtin_to_include"):
        config.is_non_builtin_to_include = True


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
    from foundling.model.kernels.cudnn_band import band
    from foundling.model.kernels.flash4 import flash4
    from foundling.model.mlp import relu2_matmul

    found = [getattr(torch.ops.aten, name, None) for name in SAVED_OPS]
    ours = [op._opoverload for op in (relu2_matmul, band, flash4)]
    return [*(op.default for op in found if op is not None), *ours]
