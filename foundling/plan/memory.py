"""Memory of one GPU by part and by moment: weights, gradients, optimizer state, activations."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from foundling.config.model import ModelConfig
from foundling.config.parallel import budget_share, recomputed_blocks
from foundling.plan.hardware import Gpu
from foundling.plan.params import ParamSizes, sizes_of
from foundling.plan.roofline import COEFFICIENTS as K
from foundling.plan.roofline import check_float8, narrow_params, share
from foundling.plan.serving import (
    HELD_OUT_TOKENS,
    LONGEST_TASK,
    PROMPT_TOKENS,
    cached_token_bytes,
)
from foundling.plan.workload import Workload

# Moments: the end of the forward pass, the loss's backward pass, the beginning and the end of the
# blocks' backward pass, the optimizer step, an evaluation.
#
# The parts do not simply add up: gradients grow while activations shrink, the copy for the update
# ratio exists only at the step. So every moment lists what it holds, and the peak is one of them.
#
# Weights, gradients and moments are counted from the parameters' shapes, the loss from the chunks
# of foundling/model/loss.py. ZeRO's stages as Rajbhandari et al. 2020 count them: FSDP divides
# weights, gradients and moments by the shard degree.

CHUNK_LOGITS, MOST_CHUNK_LOGITS, CHUNK_SHARE, MOST_CHUNK_ROWS = 1 << 21, 1 << 30, 128, 8192
"""As in foundling/model/loss.py, which needs torch; a test keeps the two equal."""
OTHERS_CHUNK = 1 << 28
"""Logits that other projects' losses in chunks hold at once, about."""
MUON_STACK = 1 << 27
"""As in foundling/optim/muon.py, likewise."""
Parts = dict[str, float]
"""Bytes by part."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one GPU."""

    moments: dict[str, dict[str, int]]
    """Moment, then part, then bytes."""
    peak: int
    """Allocated by torch at the worst moment."""
    moment: str
    needed: int
    """The peak with the allocator's slack and the driver's own."""
    largest: int
    """The largest single tensor: what must still be found in one piece among freed blocks."""
    capacity: int
    fits: bool

    @property
    def parts(self) -> dict[str, int]:
        """What is there at the worst moment."""
        return self.moments[self.moment]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "parts": self.parts}


def checkpoint_bytes(model: ModelConfig, optimizer: str) -> int:
    """What a checkpoint holds: weights in fp32 and the optimizer's state."""
    sizes = sizes_of(model)
    return 4 * sizes.all + optimizer_bytes(optimizer, sizes)


def plan_memory(work: Workload, gpu: Gpu) -> MemoryEstimate:
    """The parts at every moment, the worst of them, and whether it fits."""
    check_float8(work, gpu)
    sizes = sizes_of(work.model)
    moments = {
        name: {part: round(size) for part, size in parts.items() if size >= 1}
        for name, parts in _moments(work, gpu, sizes).items()
    }
    totals = {name: sum(parts.values()) for name, parts in moments.items()}
    moment = max(totals, key=lambda name: totals[name])
    context = K.context if gpu.ceilings is None else gpu.ceilings.context_bytes
    # Logits in fp32 where the loss is plain, else the stream through a feed-forward layer.
    largest = work.width * work.positions * max(work.model.ffn_dim, work.model.dim)
    if work.loss == "plain":
        largest = 4 * work.positions * work.model.vocab_size
    needed = round(totals[moment] * (1 + K.slack)) + (context if gpu.name != "cpu" else 0)
    return MemoryEstimate(
        moments=moments,
        peak=totals[moment],
        moment=moment,
        needed=needed,
        largest=largest // work.layout.tensor,
        capacity=gpu.memory,
        fits=needed <= gpu.memory,
    )


def _moments(work: Workload, gpu: Gpu, sizes: ParamSizes) -> dict[str, Parts]:
    owners = _owners(work)
    model, copies, kept = work.model, _copies(work, sizes), activation_bytes(work, gpu)
    head, in_flight = _head(work, gpu), backward_bytes(work)
    gradients = work.weight_bytes * sizes.all / owners
    static = {
        "weights": work.weight_bytes * sizes.all / owners,
        "optimizer": optimizer_bytes(work.optimizer, sizes, work.weight_bytes) / owners,
    }
    # Gradients of earlier micro-steps wait for the last; DDP's live in buckets for good.
    held = gradients if work.layout.replicate > 1 else 0.0
    waiting = gradients if work.accumulation > 1 else held
    # The head's gradient is there before any other.
    first = max(waiting, work.weight_bytes * sizes.head / owners)
    tables = work.weight_bytes * (sizes.tables + sizes.head) / owners

    def passing(gradients: float, activations: float, more: Parts) -> Parts:
        held = {"gradients": gradients, "activations": activations}
        return {**static, **copies, **held, **more}

    def generating(tokens: int, copies: Parts, more: Parts) -> Parts:
        cache = float(cached_token_bytes(model, work.width) * tokens)
        return {**static, **copies, "gradients": held, "key-value cache": cache, **more}

    again = {"made again": kept["made again"]}
    whole = kept["kept"] + head["final norm"]
    moments = {
        "forward": passing(waiting, whole, {"loss": head["forward"]}),
        "loss": passing(waiting, kept["kept"], {"loss": head["backward"]}),
        "backward": passing(first, kept["kept"], {**again, "in flight": in_flight}),
        "backward's end": passing(
            gradients, kept["per block"], {**again, "in flight": in_flight + tables}
        ),
        "step": {
            **static,
            "gradients": gradients,
            "update ratio": static["weights"] if work.measures_update else 0.0,
            "in flight": _step_bytes(work, sizes),
        },
    }
    scored = {"in flight": in_flight, "loss": head["evaluation"]}
    if work.evaluates:
        moments["evaluation"] = generating(HELD_OUT_TOKENS + work.seq_len, copies, scored)
    if work.asks:
        moments["tasks"] = generating(work.positions + LONGEST_TASK, copies, scored)
    if work.sampled:
        wide = 4.0 * work.sampled * (model.ffn_dim * 3 + model.dim * 4)
        moments["sampling"] = generating(PROMPT_TOKENS + work.sampled, {}, {"in flight": wide})
    return moments


def _step_bytes(work: Workload, sizes: ParamSizes) -> float:
    """What the optimizer makes on the way. Muon: a stack of matrices of one shape ahead of their
    gradients in fp32, and five times in bf16 while it is orthogonalised; in most models a third of
    the matrices' numbers is of one shape."""
    if work.optimizer == "muon":
        return 14.0 * min(MUON_STACK, sizes.blocks / 3)
    return 2.0 * work.weight_bytes * sizes.largest_block / _owners(work)


def _owners(work: Workload) -> int:
    """GPUs over which weights, gradients and moments are spread."""
    return work.layout.shard * work.layout.tensor


def _copies(work: Workload, sizes: ParamSizes) -> dict[str, float]:
    """bf16 copies of fp32 weights (autocast keeps them until the micro-step ends), or what FSDP
    gathers: two blocks and the ends of the model, and the gradients of two blocks on their way."""
    tensor = work.layout.tensor
    width = work.width
    # What tensor parallelism gathers before a product and sums after one: a whole stream each.
    stream = width * work.positions * work.model.dim
    buffers = {"tensor buffers": 2.0 * stream if tensor > 1 else 0.0}
    if work.layout.shard > 1:
        ends = sizes.tables + sizes.head
        gathered = width * (2 * sizes.largest_block + ends) / tensor
        on_their_way = {"gradients on their way": gathered * 2}
        return {"gathered weights": gathered, **on_their_way, **buffers}
    copied = 0.0
    if width != work.weight_bytes:  # in float8 a byte each
        eight = narrow_params(work)
        copied = (width * (sizes.blocks - eight) + eight) / tensor
    return {"bf16 copies": copied, **buffers}


def _head(work: Workload, gpu: Gpu) -> dict[str, float]:
    """Bytes of head and loss at each moment."""
    model, width, tensor = work.model, work.width, work.layout.tensor
    stream = work.stream_bytes * model.dim * work.positions / tensor
    rows, vocab = work.positions, model.vocab_size
    head = vocab * model.dim / tensor
    bent = 4 if model.logit_softcap else 0
    if work.loss == "plain":
        logits = rows * vocab / tensor
        if work.logit_bytes is not None:
            forward, backward = work.logit_bytes
            return {
                "final norm": 2 * stream,
                "forward": forward * logits,
                "backward": backward * logits + stream,
                "evaluation": forward * logits,
            }
        # Logits, their fp32 copy, log-softmax; then its gradient and what it is computed from.
        wide = 0 if work.dtype == "fp32" else 4
        bends = 8 if bent else 0
        kept = (4 + (wide if bent else 0) + bends) * logits
        return {
            "final norm": 2 * stream,
            "forward": (width + wide + 4 + bends) * logits + width * head,
            "backward": kept + 8 * logits + 4 * head,
            "evaluation": (width + wide + 4) * logits,
        }
    chunk = min(chunk_rows(gpu, vocab, work.loss), rows) * vocab / tensor
    # On a GPU the logits become their own gradient; on a CPU logits and exponentials are in fp32.
    in_place = gpu.name != "cpu" and tensor == 1 and work.loss == "fused"
    per_logit = width if in_place else 8 + bent
    copy = width * head if width == 2 else 0.0
    narrow = head if work.float8_head else 0.0  # a byte each, in training alone
    return {
        "final norm": 2 * stream,
        "forward": stream + 4 * head + copy + narrow + per_logit * chunk,
        "backward": 2 * 4 * head + 2 * stream,
        "evaluation": copy + per_logit * chunk,
    }


def chunk_rows(gpu: Gpu, vocab: int, loss: str = "fused") -> int:
    """Rows whose logits a loss in chunks holds at once."""
    if loss != "fused":
        return max(1, OTHERS_CHUNK // max(vocab, 1))
    if gpu.name == "cpu":
        return max(1, CHUNK_LOGITS // max(vocab, 1))
    limit = min(MOST_CHUNK_LOGITS, gpu.memory // CHUNK_SHARE)
    return min(MOST_CHUNK_ROWS, max(1, limit // max(vocab, 1)))


# What the forward pass keeps for the backward pass, operation by operation, in bytes a position.
#
# Read off foundling/model: a linear keeps its input, a norm its input and statistics, attention q,
# k, v, its result and the log-sum-exp (FlashAttention, Dao et al. 2022), SwiGLU both factors, the
# bent gate and the product. Under autocast every linear casts its own copy of a fp32 input (torch
# caches casts of weights only), which is why q, k, v keep three. A compiled block keeps one cast,
# and makes the bent gate again. Rejected: Korthikanti et al.'s 34 s b h (2022), which is GPT-3's
# block in 16 bits and none here.
#
# Legend: C width, Q and K widths of all query and of all key heads, F feed-forward width, w bytes
# of a matrix product's numbers, r of the residual stream's.


def attention_kernel(work: Workload, gpu: Gpu, layer: int) -> str:
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


def block_parts(work: Workload, gpu: Gpu, layer: int) -> Parts:
    """Bytes a position that one block keeps when nothing is recomputed, by operation."""
    model, w, r = work.model, work.width, work.stream_bytes
    c, f = model.dim, model.ffn_dim
    q, k = model.heads * model.head_width, model.num_kv_heads * model.head_width
    gated = model.activation == "swiglu"
    once = work.compile or work.dtype == "fp32" or r == w
    statistics = 4 if model.norm_is_rms else 8
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
    if gpu.name == "cpu" and model.norm == "rms":
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


def _ffn_copies(work: Workload) -> float:
    """Tensors as wide as the feed-forward layer that are kept."""
    again = _made_again(work, "ffn.down")
    if work.model.activation == "swiglu":
        return 3 - again if work.compile else 4
    return 2 - again if work.model.activation == "gelu" else 1


def _made_again(work: Workload, product: str) -> float:
    """Share of the layers in which a product's input is not kept: a compiled block casts it to
    float8 anew from what it was made of."""
    return share(work, product) if work.compile else 0.0


def kept_bytes(work: Workload, gpu: Gpu, layer: int) -> float:
    """Bytes a position that one block keeps under the policy."""
    whole = sum(block_parts(work, gpu, layer).values())
    if layer not in recomputed_blocks(work.recompute, work.model.layers):
        return whole
    model, w = work.model, work.width
    own_input = work.stream_bytes * model.dim
    budget = budget_share(work.recompute)
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


def _fed_bytes(work: Workload, gpu: Gpu, layer: int) -> float:
    """What the feed-forward half keeps, but for its own input."""
    parts = block_parts(work, gpu, layer)
    return parts["ffn"] + parts["inputs of ffn"]


def activation_bytes(work: Workload, gpu: Gpu) -> dict[str, float]:
    """All blocks' kept bytes, and the widest set that a recomputed block makes again."""
    again = recomputed_blocks(work.recompute, work.model.layers)
    positions = work.positions / work.layout.tensor
    kinds = Counter(_likes(work.model, again))  # depth must not make a plan slow
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
def _likes(model: ModelConfig, again: tuple[int, ...]) -> tuple[int, ...]:
    """For each layer the first that is like it."""
    recomputed, valued = set(again), set(model.value_layers)
    first: dict[tuple[bool, bool, bool], int] = {}
    found = []
    for layer in range(model.layers):
        kind = (bool(model.window_of(layer)), layer in valued, layer in recomputed)
        found.append(first.setdefault(kind, layer))
    return tuple(found)


def kept_by_policy(work: Workload, gpu: Gpu, policies: Iterable[str]) -> dict[str, list[int]]:
    """Bytes that each block keeps, under each policy."""
    positions = work.positions / work.layout.tensor
    found: dict[str, list[int]] = {}
    for policy in policies:
        under = replace(work, recompute=policy)
        again = recomputed_blocks(policy, work.model.layers)
        likes = _likes(work.model, again)
        kinds = {layer: round(positions * kept_bytes(under, gpu, layer)) for layer in set(likes)}
        found[policy] = [kinds[like] for like in likes]
    return found


def backward_bytes(work: Workload) -> float:
    """Gradients in flight inside one block: of the stream and of the feed-forward's tensors. Where
    the block was made again, its own tensors go as their gradients come."""
    model, again = work.model, recomputed_blocks(work.recompute, work.model.layers)
    stream = work.stream_bytes * model.dim
    wide = 3 if model.activation == "swiglu" else 2
    per_position = work.width * wide * model.ffn_dim + 2.0 * stream
    if again:
        per_position = work.width * model.ffn_dim + 1.5 * stream
    return per_position * work.positions / work.layout.tensor


# What each optimizer keeps, in bytes: counted from the parameters' shapes, exact.
#
# AdamW keeps two moments as wide as the weights; in 8 bits a byte for each, and a fp32 scale for
# each block of a row; Muon one momentum for the blocks' matrices and AdamW's two for the rest.

OPTIMIZERS = {
    "adamw": "AdamW's moments",
    "adamw8bit": "AdamW's moments in 8 bits",
    "adamw8bit-wide": "AdamW's moments in 8 bits, of the embeddings in fp32",
    "muon": "Muon's moment and AdamW's for the rest",
}
"""The state of each in words."""


def optimizer_bytes(kind: str, sizes: ParamSizes, weight_bytes: int = 4) -> int:
    """State of the optimizer."""
    if kind == "adamw":
        return 2 * weight_bytes * sizes.all
    if kind in ("adamw8bit", "adamw8bit-wide"):
        covered, scales = sizes.covered, sizes.scales
        if kind.endswith("wide"):
            covered, scales = covered - sizes.embedding, scales - sizes.embedding_scales
        return 8 * (sizes.all - covered) + 2 * covered + 8 * scales
    return weight_bytes * (sizes.blocks + 2 * (sizes.all - sizes.blocks))
