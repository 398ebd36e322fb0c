"""Rates of kernels on a GPU: the roofline (Williams et al. 2009), traffic, float8, fitted
coefficients."""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from foundling.config.errors import ConfigError
from foundling.config.model import ModelConfig
from foundling.config.train import FLOAT8_MULTIPLE
from foundling.plan.hardware import TABLE, AttentionRate, Ceilings, Gpu
from foundling.plan.params import block_matrices, sizes_of
from foundling.plan.workload import Workload

# A product of m x k with k x n reaches peak x share x s(m) s(n) s(k), s(x) = x / (x + half): tiles,
# waves and the main loop each lose a constant amount that long sides make up for. Where the device
# was measured, the curve is bent towards the measured shapes, the nearest counting most.


def product_rate(gpu: Gpu, dtype: str, m: float, n: float, k: float) -> float:
    """FLOP/s of one matrix product."""
    curve = _curve(gpu, dtype, m, n, k)
    if gpu.ceilings is None:
        return curve
    cooler = COEFFICIENTS.product_in_step if dtype != "fp32" and gpu.name != "cpu" else 1.0
    return cooler * curve * math.exp(_correction(gpu, gpu.ceilings, dtype, m, n, k))


def _curve(gpu: Gpu, dtype: str, m: float, n: float, k: float) -> float:
    share, half = COEFFICIENTS.product_share, COEFFICIENTS.product_half
    if gpu.name == "cpu":
        share, half = COEFFICIENTS.cpu_share, COEFFICIENTS.cpu_half
    elif dtype == "fp32":
        share, half = COEFFICIENTS.fp32_share, COEFFICIENTS.fp32_half
    shape = math.prod(side / (side + half) for side in (m, n, k))
    return gpu.peak(dtype) * gpu.reach * share * shape


def _correction(gpu: Gpu, ceilings: Ceilings, dtype: str, m: float, n: float, k: float) -> float:
    """Mean of log(measured / curve) over the measured shapes, weighted by nearness."""
    total = weights = 0.0
    for rate in ceilings.matmul:
        if rate.dtype != dtype or rate.flops_per_s <= 0:
            continue
        sides = zip(sorted((m, n, k)), sorted((rate.m, rate.n, rate.k)), strict=True)
        distance = sum(math.log2(a / b) ** 2 for a, b in sides)
        weight = 1 / (0.25 + distance) ** 2
        off = math.log(rate.flops_per_s / _curve(gpu, dtype, rate.m, rate.n, rate.k))
        total, weights = total + weight * off, weights + weight
    return total / weights if weights else 0.0


def product_seconds(gpu: Gpu, dtype: str, m: float, n: float, k: float) -> float:
    """Seconds of one product: its FLOPs or its bytes, whichever take longer."""
    width = 4 if dtype == "fp32" else 2
    traffic = width * (m * k + k * n + m * n)
    return max(2 * m * n * k / product_rate(gpu, dtype, m, n, k), traffic / stream_rate(gpu))


def stream_rate(gpu: Gpu) -> float:
    """Bytes a second of elementwise kernels."""
    if gpu.ceilings is not None and gpu.ceilings.copy_bytes_per_s > 0:
        found = gpu.ceilings
        if gpu.name == "cpu" and found.norm_bytes_per_s > 0:
            # Arithmetic and not the memory holds a CPU up, and exponentials more than a norm.
            return found.norm_bytes_per_s * COEFFICIENTS.cpu_elementwise
        rates = [r for r in (found.copy_bytes_per_s, found.norm_bytes_per_s) if r > 0]
        return math.exp(sum(map(math.log, rates)) / len(rates))
    return gpu.bandwidth * COEFFICIENTS.elementwise_share


def optimizer_rate(gpu: Gpu) -> float:
    """Bytes a second of the optimizer's one pass."""
    if gpu.ceilings is not None and gpu.ceilings.optimizer_bytes_per_s > 0:
        return gpu.ceilings.optimizer_bytes_per_s
    return gpu.bandwidth * COEFFICIENTS.optimizer_share


def launch_seconds(gpu: Gpu) -> float:
    """Seconds that Python takes for one small operation."""
    if gpu.ceilings is not None and gpu.ceilings.launch_s > 0:
        return gpu.ceilings.launch_s
    return COEFFICIENTS.launch_s


def attention_rate(gpu: Gpu, dtype: str, kernel: str, head_width: int, seq_len: int) -> float:
    """FLOP/s of attention, forward and backward, counted causally (7 H T^2 D a row)."""
    if gpu.ceilings is not None and kernel in ("cudnn", "band", "flash", "flash3", "flash4", "cpu"):
        near = [rate for rate in gpu.ceilings.attention if rate.dtype == dtype]
        if near:

            def distance(rate: AttentionRate) -> float:
                off = abs(math.log2(rate.head_dim / head_width)) * 2
                return off + abs(math.log2(rate.seq / seq_len))

            best = min(near, key=distance)
            return best.flops_per_s * (COEFFICIENTS.band_share if kernel == "band" else 1)
    wide = head_width >= 96
    if kernel == "cpu":
        return gpu.peak(dtype) * 0.3
    if kernel in ("cudnn", "band", "flash3", "flash4"):
        # FlashAttention 4 is faster by 5% in wide heads and 14 to 20% in narrow ones, on an H200.
        share = COEFFICIENTS.cudnn_share_wide if wide else COEFFICIENTS.cudnn_share
        share *= COEFFICIENTS.band_share if kernel == "band" else 1
    else:
        share = COEFFICIENTS.flash_share_wide if wide else COEFFICIENTS.flash_share
    # Short rows leave blocks half masked: measured at 2048, where a block of 128 is 6% of a row.
    fill = (seq_len / (seq_len + 256)) / (2048 / (2048 + 256))
    return gpu.peak(dtype) * gpu.reach * share * fill / COEFFICIENTS.attention_overhead


# Bytes that elementwise kernels move: norms, rotations, sums, activations, casts.
#
# Counted kernel by kernel from foundling/model: each reads and writes whole tensors. Compiled, a
# chain of operations is read once and written once.
#
# Legend: C width, F feed-forward width, w bytes of a matrix product's numbers, r of the residual
# stream's.

# Times that eager kernels of the activation read or write a tensor as wide as the feed-forward.
WIDE_PASSES = {"swiglu": (5, 9), "relu": (2, 3), "relu2": (4, 12), "gelu": (2, 3)}


def block_traffic(work: Workload, *, fused_mlp: bool) -> tuple[float, float]:
    """Bytes a position that one block's elementwise kernels move, forward and backward."""
    return _compiled(work, fused_mlp) if work.compile else _eager(work)


def _compiled(work: Workload, fused_mlp: bool) -> tuple[float, float]:
    model, w, r = work.model, work.width, work.stream_bytes
    c, f = model.dim, model.ffn_dim
    q = (model.heads + model.num_kv_heads) * model.head_width
    gated = model.activation == "swiglu"
    wide_forward, wide_backward = (3, 6) if gated else (0, 1) if fused_mlp else (2, 4)
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


def _valued(work: Workload) -> tuple[float, float]:
    """Value embeddings: rows are looked up and mixed into the values; backward their gradient is
    made and added to a table in fp32."""
    model, w = work.model, work.width
    k = model.num_kv_heads * model.head_width * len(model.value_layers) / model.layers
    return (2 + 3) * w * k, (3 + 1) * w * k + 8 * k


def _eager(work: Workload) -> tuple[float, float]:
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


def weight_traffic(work: Workload) -> float:
    """Bytes moved to cast weights down and their gradients up, and to add them to earlier ones."""
    sizes = sizes_of(work.model)
    added = 12 * (1 - 1 / work.accumulation)
    if work.width == work.weight_bytes:
        return added * sizes.all / work.layout.tensor
    # In float8 the largest number is looked for first, and the cast is laid out both ways.
    eight = 5.0 * narrow_params(work)
    return ((6 + 6 + added) * sizes.blocks + eight) / work.layout.tensor


# What float8 changes in a step: the products' rate, the casts around them, and what is kept.
#
# Every operand is scaled anew where it is used (torchao): its largest number is looked for, it is
# cast, and for a weight's gradient it is laid out the other way. A compiled block then makes the
# inputs of its products again from what is kept anyway, because a cast is cheap to repeat. Weights
# and residual stream stay as they are.

FOUND_BYTES, CAST_BYTES, TURNED_BYTES = 2, 3, 2
"""Of one number in bf16: read for the largest, read and written to cast, laid out anew."""


def check_float8(work: Workload, gpu: Gpu) -> None:
    """Refuse a GPU that has no such products, as a run on it would be; of one that is not in the
    table, the run itself knows more."""
    if work.float8 != "none" and gpu.name in TABLE and "fp8" not in gpu.peaks:
        raise ConfigError(
            f"train.float8 {work.float8} needs a GPU with float8 products, and {gpu.name} has none;"
            f" set it to none, or leave {gpu.name} out."
        )


def is_skipped(name: str, skip: Iterable[str]) -> bool:
    """Whether a product (layers.1.attn.q) is left out by some part of its name."""
    return any(part in name for part in skip)


def check_skip(model: ModelConfig, skip: tuple[str, ...]) -> None:
    """Refuse what is in no product's name, where a slip would leave nothing out, and a number that
    others begin with. Asked where something begins: a run that began with it goes on with it."""
    names = [name for name, _ in _chosen(model, ())] if skip else []
    for part in (part for part in skip if part != "head"):
        found = [name for name in names if part in name]
        if not found:
            raise ConfigError(
                f"train.float8_skip {part} has no effect: no product that float8 could take has it"
                f" in its name; name parts such as attn, ffn.down or layers.{model.layers - 1}."
            )
        longer = [name for name in found if re.search(rf"{re.escape(part)}\d", name)]
        if part[-1:].isdigit() and longer:
            raise ConfigError(
                f"train.float8_skip {part} leaves out {longer[0]} too; write {part}. with the dot."
            )


def narrowed(work: Workload) -> dict[tuple[int, int], int]:
    """How many of the blocks' matrices [out, in] of each shape are multiplied in float8."""
    if work.float8 == "none":
        return {}
    return Counter(shape for _, shape in _chosen(work.model, work.float8_skip))


def gain(work: Workload) -> float:
    """How many times as fast such a product is as in bf16."""
    return {"tensorwise": COEFFICIENTS.tensorwise_gain, "rowwise": COEFFICIENTS.rowwise_gain}.get(
        work.float8, 1.0
    )


def share(work: Workload, name: str) -> float:
    """Of the layers, those whose product of this name (attn.q, ffn.down) is in float8."""
    if work.float8 == "none":
        return 0.0
    chosen = _chosen(work.model, work.float8_skip)
    return sum(found.endswith(f".{name}") for found, _ in chosen) / work.model.layers


def narrow_params(work: Workload) -> int:
    """Numbers in matrices that are multiplied in float8."""
    return sum(out * width * count for (out, width), count in narrowed(work).items())


def cast_traffic(work: Workload) -> tuple[float, float]:
    """Bytes a position that casts move in one block, forward and backward."""
    if work.float8 == "none":
        return 0.0, 0.0
    model = work.model
    # q, k and v have one input, and so have gate and up: it is cast once.
    inputs = share(work, "attn.q") * model.dim + share(work, "ffn.up") * model.dim
    inputs += share(work, "attn.o") * model.heads * model.head_width
    inputs += share(work, "ffn.down") * model.ffn_dim
    outputs = sum(out * count for (out, _), count in narrowed(work).items()) / model.layers
    forward = (FOUND_BYTES + CAST_BYTES) * inputs
    backward = (FOUND_BYTES + CAST_BYTES + TURNED_BYTES) * outputs + CAST_BYTES * inputs
    return forward, backward


@lru_cache(maxsize=64)
def _chosen(model: ModelConfig, skip: tuple[str, ...]) -> tuple[tuple[str, tuple[int, int]], ...]:
    """Names and shapes of the products that torchao takes over (foundling/parallel/apply.py)."""
    return tuple(
        (name, shape)
        for name, shape in block_matrices(model)
        if not any(side % FLOAT8_MULTIPLE for side in shape) and not is_skipped(name, skip)
    )


# Every number of the memory and speed model that is not arithmetic, in one place.
#
# Each says what it was taken from. FITTED_ON names the configurations that were used, so that the
# errors of all others are an honest result; nothing may be fitted on more than half of what was
# run.

FITTED_ON: tuple[str, ...] = (
    "the 12 lines marked `fit` of tests/gpu/plan_grid.py on one H200 (docs/plan.md has the table)",
    "llama-1.24b on one H200, batch 24 x 2048, bf16, blocks compiled, fused loss (the 100-line"
    " script's: matrix products 502 ms at 729 TFLOP/s, attention 80, elementwise 83, optimizer 10,"
    " other 13)",
    "attention alone, 16 x 2048 on one H200: cuDNN 2.81 and 2.25 ms, flash 4.61 and 4.11 ms",
    "the fp32 rows of a public 1.24B Llama on one H100 (fp32_share; docs/accounts.md)",
    "the 1333 tok/s of Llama 3.1 8B on Frontier (the reach of the MI250X in hardware.py)",
)


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """Shares of a peak, bytes and seconds that only a measurement can give."""

    # Matrix products: rate = peak x share x s(m) s(n) s(k), s(x) = x / (x + half).
    # Ten shapes on one H200 alone (511 TFLOP/s at 384 x 1408, 651 at 4096 x 14336) give the half;
    # 802 TFLOP/s at 8192 cubed and 729 over the 2048-wide model's own shapes the share.
    product_share: float = 0.83
    product_half: float = 80.0
    # Products one after the other heat the device and run slower than between other kernels:
    # 741 TFLOP/s in a step of the 1.24B model where the same shapes alone reach 612.
    product_in_step: float = 1.24
    # Products in float8 over the same in bf16: 1300 and 802 TFLOP/s at 8192 cubed on one H200; a
    # scale for each row takes another kernel, with which the 100-line script is as fast as in bf16.
    tensorwise_gain: float = 1.62
    rowwise_gain: float = 1.0
    # CUDA cores: the fp32 run of the 1.24B Llama reaches 41 TFLOP/s in all, sgemm about 0.8 of
    # 66.9.
    fp32_share: float = 0.80
    fp32_half: float = 24.0
    cpu_share: float = 0.80
    cpu_half: float = 24.0
    # Of the rate that a norm reaches, from a probe of the demo's model on two quiet cores (0.7 had
    # been a guess and made its step 21% too long).
    cpu_elementwise: float = 1.2
    # Attention, forward and backward, causal FLOPs: share of the dense peak by width of a head.
    cudnn_share: float = 0.346
    cudnn_share_wide: float = 0.432
    flash_share: float = 0.21
    flash_share_wide: float = 0.237
    # Of cuDNN's rate for whole rows, in a window of 1024 (tiles are half masked on both sides):
    # 291 of 397 TFLOP/s in rows of 2048, 298 of 506 in rows of 8192.
    band_share: float = 0.73
    attention_overhead: float = 1.15
    # Share of the memory bandwidth that elementwise kernels reach (SwiGLU's backward: 15 of 31 ms
    # at worst, plain copies 0.9).
    elementwise_share: float = 0.75
    # Bytes that eager kernels move over those counted; a compiled block moves what is counted.
    elementwise_eager: float = 1.2
    optimizer_share: float = 0.75
    # Seconds between two kernels that wait in the queue, and from launch to launch in Python.
    gap_s: float = 1.4e-6
    launch_s: float = 8e-6
    # Clipping and the optimizer's own Python, while the GPU waits: by tensor, and a fixed part;
    # update ratios go over the tensors once more.
    tensor_s: float = 1.2e-5
    tensor_ratio_s: float = 1.2e-5
    step_overhead_s: float = 1.0e-3
    # Communication: share of a link that large collectives reach.
    link_share: float = 0.75
    network_share: float = 0.75
    # The wait to start a collective, and for each hop of its ring or tree within a node and between
    # nodes: NCCL's own table for its Simple protocol (src/graph/tuning.cc: 3.4 and 14 us).
    latency_s: float = 15e-6
    hop_inside_s: float = 3.4e-6
    hop_between_s: float = 14e-6
    # Beside the steps. Start and first step on an H200 are 14.8 to 29.1 s together, 51 s with all
    # blocks in one graph (docs/performance.md); imports and weights are about 10 of them.
    start_cuda_s: float = 10.0
    compile_blocks_s: float = 14.0
    compile_model_s: float = 40.0
    # On two cores, hamlet's shape: compiled in 14 s, and in 28 s with other work; a save of its
    # 13 MB is files and agreement more than bytes.
    start_s: float = 5.0
    compile_cpu_s: float = 20.0
    save_s: float = 0.02
    # Share of the backward pass with which gradient traffic can overlap (DDP, FSDP).
    overlap: float = 0.8
    # A step waits for its slowest rank: this much longer each time the nodes double.
    straggle_per_doubling: float = 0.005
    # Memory: cached blocks that do not fit anything, and what the driver takes.
    slack: float = 0.03
    context: int = 600_000_000
    headroom: float = 0.05
    """Share of the device that `auto` leaves free."""


COEFFICIENTS = Coefficients()
