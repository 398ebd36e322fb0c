"""FlashAttention 4 (package flash-attn-4), each pass as an operator that a compiler takes as it is.

The package's own function is an autograd.Function around kernels that Python writes: a compiler
that looks into it breaks the block's graph in two. Rejected: torch's bridge to the package
(`torch.nn.attention.activate_flash_attention_impl`), which replaces the flash kernel of the whole
process and expects results that newer releases do not give.

Shapes: rows [B, T, H, D], or with `starts` documents laid end to end [B x T, H, D].
"""

import contextlib
import importlib
import os
import warnings
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from foundling.runtime.files import cache_folder

_KEEP = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
_WHERE = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


def _library() -> Any:
    _prepare()
    return importlib.import_module("flash_attn.cute.interface")


@lru_cache
def _prepare() -> None:
    """Its kernels are compiled when they are first launched, a quarter of a minute, and kept for
    later runs unless set otherwise."""
    if _KEEP not in os.environ:
        folder = cache_folder("flash4")
        with contextlib.suppress(OSError):  # then they are compiled each time
            folder.mkdir(parents=True, exist_ok=True)
            os.environ[_KEEP] = "1"
            os.environ.setdefault(_WHERE, str(folder))
    # Of its own compiler, about its own arguments.
    warnings.filterwarnings("ignore", "Argument .* cannot be converted to a JitArgument")


@torch.library.custom_op("foundling::flash4", mutates_args=())
def flash4(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, width: int, window: int
) -> tuple[Tensor, Tensor]:
    """What each position mixes, and the logarithms of the softmax's sums."""
    how = _how(starts, width, window)
    # Below its autograd function, which torch.compile cannot see through.
    out, sums, *_ = _library()._flash_attn_fwd(q, k, v, return_lse=True, **how)
    return out, sums


@flash4.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, *_: int) -> tuple[Tensor, Tensor]:
    sums = (q.shape[1], q.shape[0]) if starts is not None else (len(q), q.shape[2], q.shape[1])
    return q.new_empty(q.shape), q.new_empty(sums, dtype=torch.float32)


@torch.library.custom_op("foundling::flash4_backward", mutates_args=())
def flash4_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    out: Tensor,
    sums: Tensor,
    width: int,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    how = _how(starts, width, window)
    how["deterministic"] = torch.are_deterministic_algorithms_enabled()
    dq, dk, dv, *_ = _library()._flash_attn_bwd(q, k, v, out, grad, sums, **how)
    return dq, dk, dv


@flash4_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _how(starts: Tensor | None, width: int, window: int) -> dict[str, Any]:
    """A window is counted from the position itself, to the left; None: it has no end."""
    how: dict[str, Any] = {"causal": True}
    if window:
        how |= {"window_size_left": window - 1, "window_size_right": 0}
    if starts is not None:
        how |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        how |= {"max_seqlen_q": width, "max_seqlen_k": width}
    return how


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.width, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)


def _turn(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    found = flash4_backward(grad, *ctx.saved_tensors, ctx.width, ctx.window)
    return (*found, None, None, None)


flash4.register_autograd(_turn, setup_context=_keep)
