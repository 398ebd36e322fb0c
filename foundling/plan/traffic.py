"""Bytes that elementwise kernels move: norms, rotations, sums, activations, casts.

Counted kernel by kernel from foundling/model: each reads and writes whole tensors. Compiled, a
chain of operations is read once and written once.

Legend: C width, F feed-forward width, w bytes of a matrix product's numbers, r of the residual
stream's.
"""

from foundling.plan.float8 import cast_traffic, narrow_params
from foundling.plan.work import Work, sizes_of

# Times that eager kernels of the activation read or write a tensor as wide as the feed-forward.
WIDE_PASSES = {"swiglu": (5, 9), "relu": (2, 3), "relu2": (4, 12), "gelu": (2, 3)}


def block_traffic(work: Work, *, fused_feed: bool) -> tuple[float, float]:
    """Bytes a position that one block's elementwise kernels move, forward and backward."""
    return _compiled(work, fused_feed) if work.compile else _eager(work)


def _compiled(work: Work, fused_feed: bool) -> tuple[float, float]:
    model, w, r = work.model, work.width, work.stream_bytes
    c, f = model.dim, model.ffn_dim
    q = (model.heads + model.num_kv_heads) * model.head_width
    gated = model.activation == "swiglu"
    wide_forward, wide_backward = (3, 6) if gated else (0, 1) if fused_feed else (2, 4)
    forward: float = 2 * (2 * r + 2 * w) * c + 2 * w * q + wide_forward * w * f
    backward: float = 2 * (4 * r + 2 * w) * c + 2 * w * q + wide_backward * w * f
    if model.qk_norm:
        backward += w * q  # what was normed is read again
    if model.residual_scales:
        # The first layer's input is read, the sum written and read once more; backward both are
        # read for their scales' own gradients, and the gradient of the first input adds up.
        forward += 3 * r * c
        backward += 4 * r * c
    valued_forward, valued_backward = _valued(work)
    cast_forward, cast_backward = cast_traffic(work)
    return forward + valued_forward + cast_forward, backward + valued_backward + cast_backward


def _valued(work: Work) -> tuple[float, float]:
    """Value embeddings: rows are looked up and mixed into the values; backward their gradient is
    made and added to a table in fp32."""
    model, w = work.model, work.width
    k = model.num_kv_heads * model.head_width * len(model.value_layers) / model.layers
    return (2 + 3) * w * k, (3 + 1) * w * k + 8 * k


def _eager(work: Work) -> tuple[float, float]:
    model, w, r = work.model, work.width, work.stream_bytes
    c, f = model.dim, model.ffn_dim
    q = (model.heads + model.num_kv_heads) * model.head_width
    wide_forward, wide_backward = WIDE_PASSES[model.activation]
    casts = 0 if w == r else (r + w) * ((3 + 2) if model.activation == "swiglu" else (3 + 1))
    rotation = (40 if w == 2 else 28) * q if model.positions == "rotary" else 0
    normed = 4 * w * q if model.qk_norm else 0
    dropped = 2 * 3 * w * c if model.dropout else 0
    # Two products with a scale and their sum; backward each scale's own gradient is summed too.
    scaled = float(r * c) if model.residual_scales else 0.0
    share = len(model.value_layers) / model.layers
    valued = share * r * model.num_kv_heads * model.head_width
    extra = rotation + normed + dropped
    forward = (2 * 2 * r + casts + 2 * (2 * r + w)) * c + extra + 7 * scaled + 7 * valued
    backward = (2 * 3 * r + casts + 5 * 3 * r) * c + extra + normed + 15 * scaled + 10 * valued
    cast_forward, cast_backward = cast_traffic(work)
    forward += wide_forward * w * f + cast_forward
    return forward, backward + wide_backward * w * f + cast_backward


def weight_traffic(work: Work) -> float:
    """Bytes moved to cast weights down and their gradients up, and to add them to earlier ones."""
    sizes = sizes_of(work.model)
    added = 12 * (1 - 1 / work.accumulation)
    if work.width == work.weight_bytes:
        return added * sizes.all / work.layout.tensor
    # In float8 the largest number is looked for first, and the cast is laid out both ways.
    eight = 5.0 * narrow_params(work)
    return ((6 + 6 + added) * sizes.blocks + eight) / work.layout.tensor
