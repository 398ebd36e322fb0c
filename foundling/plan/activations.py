"""What the forward pass keeps for the backward pass, operation by operation, in bytes a position.

Read off foundling/model: a linear keeps its input, a norm its input and statistics, attention
q, k, v, its result and the log-sum-exp (FlashAttention, Dao et al. 2022), SwiGLU both factors, the
bent gate and the product. Under autocast every linear casts its own copy of a fp32 input (torch
caches casts of weights only), which is why q, k, v keep three. A compiled block keeps one cast, and
makes the bent gate again. Rejected: Korthikanti et al.'s 34 s b h (2022), which is GPT-3's block in
16 bits and nobody's here.

Legend: C width, Q and K widths of all query and of all key heads, F feed-forward width, w bytes of
a matrix product's numbers, r of the residual stream's.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from foundling.config.recompute import kept_share, recomputed_blocks
from foundling.config.sections import ModelConfig
from foundling.plan.float8 import share
from foundling.plan.hardware import Gpu
from foundling.plan.work import Work

Parts = dict[str, float]


def attention_kernel(work: Work, gpu: Gpu, layer: int) -> str:
    """The kernel that scaled_dot_product_attention takes; `math` keeps every pair of positions."""
    masked = work.document_mask or bool(work.model.window_of(layer))
    named = work.masked_kernel if masked else work.kernel
    if named:
        return named
    if gpu.name == "cpu":
        return "math" if work.model.dropout else "cpu"  # its kernel cannot drop
    if work.document_mask:
        return "flex"
    if work.width == 4:
        return "efficient"  # flash and cuDNN take no fp32
    if masked:
        return "flash"
    return "cudnn" if gpu.capability in (9.0, 10.0) else "flash"


def block_parts(work: Work, gpu: Gpu, layer: int) -> Parts:
    """Bytes a position that one block keeps when nothing is recomputed, by operation."""
    model, w, r = work.model, work.width, work.stream_bytes
    c, f = model.dim, model.ffn_dim
    q, k = model.heads * model.head_width, model.num_kv_heads * model.head_width
    gated = model.activation == "swiglu"
    once = work.compile or work.dtype == "fp32" or r == w
    statistics = 8 if model.norm == "layer" else 4
    # An eager norm keeps the fp32 copy that it works on, a compiled one the stream itself.
    normed = r if work.compile else max(r, 4)
    parts: Parts = {
        "norms": 2 * (normed * c + statistics),
        # Where it is cast to float8, it is made again too.
        "inputs of q, k, v": w * c * (1 - _made_again(work, "attn.q") if once else 3),
        "attention": w * (2 * q + 2 * k) + 4 * model.heads,
        # A compiled block makes this one again from the norm's own input.
        "inputs of ffn": 0 if work.compile else w * c * (1 if once or not gated else 2),
        "ffn": w * f * _ffn_copies(work),
    }
    if attention_kernel(work, gpu, layer) == "math":
        # Softmax's result for every pair (with dropout its noise and product too), and keys and
        # values repeated for every query head.
        per_pair = 3 * w + 1 if model.dropout else w
        repeated = 2 * w * q if work.grouped else 0
        parts["attention scores"] = per_pair * model.heads * work.seq_len + repeated
    if attention_kernel(work, gpu, layer) == "efficient" and work.grouped:
        parts["attention"] += 2 * w * (q - k)  # keys and values repeated for every query head
    if gpu.name == "cpu" and model.norm == "rms" and model.norm_weight:
        # Only CUDA has one kernel for it; elsewhere the normed stream is kept for the scale.
        parts["norms"] += 2 * r * c
    if model.qk_norm:
        parts["norms of q, k"] = w * (q + k) + statistics * 2 * model.heads
    if model.dropout:
        parts["dropout masks"] = 2 * c
    if layer in model.value_layers:
        parts["value embedding"] = r * k
    if model.residual_scales:
        parts["residual scales"] = r * c
    return parts


def _ffn_copies(work: Work) -> float:
    """Tensors as wide as the feed-forward layer that are kept."""
    again = _made_again(work, "ffn.down")
    if work.model.activation == "swiglu":
        return 3 - again if work.compile else 4
    return 2 - again if work.model.activation == "gelu" else 1


def _made_again(work: Work, product: str) -> float:
    """Share of the layers in which a product's input is not kept: a compiled block casts it to
    float8 anew from what it was made of."""
    return share(work, product) if work.compile else 0.0


def kept_bytes(work: Work, gpu: Gpu, layer: int) -> float:
    """Bytes a position that one block keeps under the policy."""
    whole = sum(block_parts(work, gpu, layer).values())
    if layer not in recomputed_blocks(work.recompute, work.model.layers):
        return whole
    model, w = work.model, work.width
    own_input = work.stream_bytes * model.dim
    budget = kept_share(work.recompute)
    if budget is not None:
        return own_input + budget * (whole - own_input)
    if work.recompute == "ffn":
        # A compiled block makes the input of q, k, v again too, from the norm's own input.
        normed = block_parts(work, gpu, layer)["inputs of q, k, v"] if work.compile else 0.0
        return whole - _fed_bytes(work, gpu, layer) - normed
    if work.recompute != "per-op":
        return own_input
    q, k = model.heads * model.head_width, model.num_kv_heads * model.head_width
    # What o and down give is only added up: a compiled block does not keep it.
    products = w * (q + 2 * k + (0 if work.compile else 2 * model.dim))
    products += w * model.ffn_dim * (2 if model.activation == "swiglu" else 1)
    fast = attention_kernel(work, gpu, layer) != "math"
    attention = w * q + 4 * model.heads if fast else 0
    return own_input + products * work.saved_products + attention


def _fed_bytes(work: Work, gpu: Gpu, layer: int) -> float:
    """What the feed-forward half keeps, but for its own input."""
    parts = block_parts(work, gpu, layer)
    return parts["ffn"] + parts["inputs of ffn"]


def activation_bytes(work: Work, gpu: Gpu) -> dict[str, float]:
    """All blocks' kept bytes, and the widest set that a recomputed block makes again."""
    again = recomputed_blocks(work.recompute, work.model.layers)
    positions = work.positions / work.layout.tensor
    kinds = _kinds_of_layer(work.model, again)
    kept = {layer: kept_bytes(work, gpu, layer) for layer in kinds}
    whole = max(sum(block_parts(work, gpu, layer).values()) for layer in kinds)
    whole -= work.stream_bytes * work.model.dim  # the block's input is kept already
    if work.recompute == "ffn":
        whole = max(_fed_bytes(work, gpu, layer) for layer in kinds)
    return {
        "kept": positions * sum(kept[layer] * count for layer, count in kinds.items()),
        "per block": positions * max(kept.values()),
        "made again": positions * whole if again else 0.0,
    }


@lru_cache(maxsize=256)
def _kinds_of_layer(model: ModelConfig, again: tuple[int, ...]) -> dict[int, int]:
    """One layer of each kind and how many are like it: depth must not make a plan slow."""
    counts: dict[int, int] = {}
    for like in _likes(model, again):
        counts[like] = counts.get(like, 0) + 1
    return counts


@lru_cache(maxsize=256)
def _likes(model: ModelConfig, again: tuple[int, ...]) -> tuple[int, ...]:
    """For each layer the first that is like it."""
    recomputed, valued = set(again), set(model.value_layers)
    first: dict[tuple[bool, bool, bool], int] = {}
    found = []
    for layer in range(model.layers):
        kind = (bool(model.window_of(layer)), layer in valued, layer in recomputed)
        found.append(first.setdefault(kind, layer))
    return tuple(found)


def kept_by_policy(work: Work, gpu: Gpu, policies: Iterable[str]) -> dict[str, list[int]]:
    """Bytes that each block keeps, under each policy."""
    positions = work.positions / work.layout.tensor
    found: dict[str, list[int]] = {}
    for policy in policies:
        under = replace(work, recompute=policy)
        again = recomputed_blocks(policy, work.model.layers)
        kinds = {
            layer: round(positions * kept_bytes(under, gpu, layer))
            for layer in _kinds_of_layer(work.model, again)
        }
        found[policy] = [kinds[like] for like in _likes(work.model, again)]
    return found


def backward_bytes(work: Work) -> float:
    """Gradients in flight inside one block: of the stream and of the feed-forward's tensors. Where
    the block was made again, its own tensors go as their gradients come."""
    model, again = work.model, recomputed_blocks(work.recompute, work.model.layers)
    stream = work.stream_bytes * model.dim
    wide = 3 if model.activation == "swiglu" else 2
    per_position = work.width * wide * model.ffn_dim + 2.0 * stream
    if again:
        per_position = work.width * model.ffn_dim + 1.5 * stream
    return per_position * work.positions / work.layout.tensor
