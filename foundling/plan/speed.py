"""Seconds of a run: one step by part, collectives, start, compilation, saves, evaluations."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from foundling.config.data import all_sources
from foundling.config.data_manifest import Manifest
from foundling.config.model import ModelConfig
from foundling.config.parallel import budget_share, recomputed_blocks
from foundling.config.run import SAMPLE_TOKENS, RunConfig
from foundling.plan.hardware import Gpu
from foundling.plan.horizon import Horizon
from foundling.plan.layout import MeshLayout
from foundling.plan.memory import attention_kernel, chunk_rows
from foundling.plan.params import block_matrices, flops_per_token, keys_seen, sizes_of
from foundling.plan.roofline import COEFFICIENTS as K
from foundling.plan.roofline import (
    attention_rate,
    block_traffic,
    check_float8,
    gain,
    launch_seconds,
    narrowed,
    optimizer_rate,
    product_rate,
    product_seconds,
    stream_rate,
    weight_traffic,
)
from foundling.plan.supply import Saving
from foundling.plan.workload import Workload, compile_on

# Every matrix of the model is three products a micro-step (forward, gradient of the input, gradient
# of the weight), each at the rate of its own shape. Elementwise work is counted in bytes moved, the
# optimizer too. Python runs ahead of the GPU: a pass whose kernels are shorter than it takes to
# launch them lasts as long as the launches. MFU is what PaLM's appendix B calls it, over the dense
# peak of the dtype.

# Kernels of one block, forward and backward.
KERNELS = {"eager": (45, 75), "compiled": (14, 24)}
# What Python does for one block, forward and backward, in small operations' time; per-op recompute
# looks at every operator in Python, twice.
LAUNCHES = {"eager": (73, 147), "compiled": (98, 107), "per-op": (367, 375)}
# Bytes that an update reads and writes for a parameter. Muon's: momentum 12, looking ahead 12, to
# bf16 and into a stack 10, norm and division 6, decay 8, update 10; the gate of one process alone
# on a GPU takes 16 more, less than a thousandth of a step.
UPDATE_BYTES = {"adamw": 28.0, "adamw8bit": 16.0, "muon": 58.0}
CPU_LAUNCHES = (45, 85)
"""Of one block on a CPU, where autograd's own thread does not run in parallel."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One step in seconds, and what follows from it."""

    parts: dict[str, float]
    """Seconds of a step: matrix (of the blocks), attention, elementwise, loss (with the head's
    products), optimizer, other (launches that nothing hides), communication that nothing hides."""
    step_s: float
    tokens_per_s: float
    """Positions a second over all GPUs, filler left out."""
    tokens_per_s_gpu: float
    mfu: float | None
    """(6 N + 12 H D x keys, by layer) x tokens/s over the dense peak of all GPUs' data sheets; None
    where there is no sheet."""
    model_flops: float
    """FLOP/s of one GPU by that count."""
    talk_s: float
    """Communication of a step, hidden or not."""
    talk_share: float
    """Share of the step that is spent waiting for communication."""
    peak_flops: float

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@lru_cache(maxsize=64)
def _products(model: ModelConfig) -> tuple[tuple[tuple[int, int], int], ...]:
    """((out, in), how many) of the blocks' matrices."""
    return tuple(Counter(shape for _, shape in block_matrices(model)).items())


def plan_speed(work: Workload, gpu: Gpu) -> Speed:
    """The step's parts, their sum and the rates."""
    check_float8(work, gpu)
    parts = _micro_parts(work, gpu)
    parts["other"] = _idle_s(work, gpu, parts)
    parts = {name: seconds * work.accumulation for name, seconds in parts.items()}
    said = talk(work, gpu)
    computed = sum(parts.values())
    backward = computed * (2 / 3) / max(work.accumulation, 1)
    exposed = max(said.ends, said.gradients - K.overlap * backward)
    if said.gathers:
        exposed = max(said.ends, said.gradients + said.gathers - K.overlap * computed)
    exposed += said.tensor
    parts["optimizer"] = _optimizer_s(work, gpu)
    if gpu.name != "cpu":  # it waits for the launches of clipping and optimizer
        each = K.tensor_s + (K.tensor_ratio_s if work.measures_update else 0.0)
        parts["other"] += K.step_overhead_s + sizes_of(work.model).tensors * each
    nodes = work.layout.nodes
    parts["communication"] = exposed
    if nodes > 1:
        parts["stragglers"] = sum(parts.values()) * K.straggle_per_doubling * math.log2(nodes)
    step_s = sum(parts.values())
    peak = gpu.peak(work.dtype)
    rate = work.tokens_per_step / step_s
    model_flops = flops_per_token(work.model, work.seq_len) * rate / work.layout.world
    return Speed(
        parts=parts,
        step_s=step_s,
        tokens_per_s=rate,
        tokens_per_s_gpu=rate / work.layout.world,
        mfu=model_flops / peak if gpu.has_sheet else None,
        model_flops=model_flops,
        talk_s=said.gradients + said.gathers + said.tensor,
        talk_share=(exposed + parts.get("stragglers", 0.0)) / step_s,
        peak_flops=peak,
    )


def _micro_parts(work: Workload, gpu: Gpu) -> dict[str, float]:
    """GPU seconds of one micro-step."""
    tensor, layers = work.layout.tensor, work.model.layers
    again = len(recomputed_blocks(work.recompute, layers)) / layers
    whole, attended = _made_again(work, again)
    forward, backward = _block_products(work, gpu, tensor)
    head = _head_products(work, gpu, tensor)
    windows = [work.model.window_of(layer) for layer in range(layers)]  # alike: planned once
    attention = sum(
        windows.count(window) * _attention_s(work, gpu, windows.index(window))
        for window in set(windows)
    )
    fused_mlp = _has_fused_mlp(work, gpu, tensor)
    moved_forward, moved_backward = block_traffic(work, fused_mlp=fused_mlp)
    moved = (moved_forward * (1 + again) + moved_backward) * work.positions * layers / tensor
    bent = 0.0
    if work.model.logit_softcap and gpu.name == "cpu":  # a GPU's one kernel bends on the way
        # All logits and their gradients, 44 bytes each, in five kernels.
        bent = 44 * (float(work.positions) * work.model.vocab_size / tensor) / stream_rate(gpu)
    moved_by_loss = _loss_bytes(work, gpu) / tensor / stream_rate(gpu)
    excess = 1.0 if work.compile or gpu.name == "cpu" else K.elementwise_eager
    return {
        "matrix": forward * (1 + whole) + backward,
        "attention": attention / tensor * (1 + attended * 2 / 7),
        "elementwise": (moved + weight_traffic(work)) * excess / stream_rate(gpu),
        "loss": (head + moved_by_loss) * _loss_correction(work, gpu) + bent,
    }


def _block_products(work: Workload, gpu: Gpu, tensor: int) -> tuple[float, float]:
    """Seconds of all blocks' products, forward and backward."""
    rows = work.positions
    forward = backward = 0.0
    eight, faster = narrowed(work), gain(work)
    for (out, width), number in _products(work.model):
        narrow = eight.get((out, width), 0)
        count = number - narrow + narrow / faster
        # Each matrix is cut on one side; which one hardly matters to its rate.
        out = max(1, out // tensor)
        forward += count * product_seconds(gpu, work.dtype, rows, out, width)
        backward += count * product_seconds(gpu, work.dtype, rows, width, out)
        backward += count * product_seconds(gpu, work.dtype, out, width, rows)
    return forward, backward


def _made_again(work: Workload, again: float) -> tuple[float, float]:
    """Shares of a forward pass's products and attention that are computed a second time."""
    share = budget_share(work.recompute)
    if share is not None:
        return 1 - share, 0.0  # the compiler keeps what costs most
    if work.recompute == "per-op":
        return again * (1 - work.saved_products), 0.0
    if work.recompute == "ffn":
        model = work.model
        block = sum(out * width * count for (out, width), count in _products(model))
        wide = 2 if model.activation == "swiglu" else 1
        return again * wide * model.layers * model.dim * model.ffn_dim / block, 0.0
    return again, again


def _head_products(work: Workload, gpu: Gpu, tensor: int) -> float:
    vocab, dim = max(1, work.model.vocab_size // tensor), work.model.dim
    rows = float(work.positions)
    if work.loss != "plain":
        rows = min(rows, max(1, chunk_rows(gpu, work.model.vocab_size, work.loss)))
    times = work.positions / rows
    shapes = ((rows, vocab, dim), (rows, dim, vocab), (vocab, dim, rows))
    forward, *backward = (product_seconds(gpu, work.dtype, *shape) for shape in shapes)
    return times * (forward / (gain(work) if work.float8_head else 1.0) + sum(backward))


def _attention_s(work: Workload, gpu: Gpu, layer: int) -> float:
    """Seconds of one layer's attention, forward and backward."""
    model = work.model
    kernel = attention_kernel(work, gpu, layer)
    heads, width, rows = model.heads, model.head_width, work.positions
    if kernel == "math":
        # Every pair is computed and written, read, masked, normalised: 10 passes in all.
        pairs = float(work.batch) * heads * work.seq_len**2
        flops = (
            12 * pairs * width / product_rate(gpu, work.dtype, work.seq_len, work.seq_len, width)
        )
        return flops + 10 * work.width * pairs / stream_rate(gpu)
    keys = keys_seen(model, layer, work.seq_len, causal=True)
    if kernel == "efficient":
        masked = work.document_mask or bool(model.window_of(layer))
        keys = float(work.seq_len) if masked else keys
    flops = 14 * rows * heads * width * keys
    return flops / attention_rate(gpu, work.dtype, kernel, width, work.seq_len)


def _has_fused_mlp(work: Workload, gpu: Gpu, tensor: int) -> bool:
    """Whether a squared ReLU is made inside its products (train.kernels.mlp)."""
    if work.feed_forward == "plain" or work.float8 != "none":
        return False
    is_new = gpu.capability >= 9
    return work.model.activation == "relu2" and work.dtype == "bf16" and is_new and tensor == 1


def _loss_bytes(work: Workload, gpu: Gpu) -> float:
    """Bytes that the loss moves in addition to the head's matmuls."""
    model, rows = work.model, work.positions
    logits = float(rows) * model.vocab_size
    if work.loss == "plain":
        per_logit = 14 if work.logit_bytes else (20 if work.dtype == "fp32" else 34)
        return per_logit * logits
    chunks = math.ceil(rows / max(1, min(chunk_rows(gpu, work.model.vocab_size, work.loss), rows)))
    if gpu.name == "cpu" or work.layout.tensor > 1 or work.loss != "fused":
        # Logits in fp32, exponentials, the gradient; and the head's own added up.
        per_logit, adding = (20, 12) if work.width == 4 else (28, 10)
        return per_logit * logits + (chunks + 1.5) * adding * model.vocab_size * model.dim
    # One kernel reads them once or twice and writes the gradient; the products write and read them
    # within their own time. The head's gradient is added to by the product itself.
    return 3 * work.width * logits + (chunks + 1.5) * 8 * model.vocab_size * model.dim


def _loss_correction(work: Workload, gpu: Gpu) -> float:
    """Measured over planned seconds of the fused loss, at the measured shape nearest to ours."""
    if gpu.ceilings is None or work.loss != "fused":
        return 1.0
    near = [rate for rate in gpu.ceilings.loss if rate.dtype == work.dtype and rate.seconds > 0]
    if not near:
        return 1.0
    dim, vocab = work.model.dim, max(work.model.vocab_size, 1)
    best = min(near, key=lambda r: abs(math.log(r.dim / dim)) + abs(math.log(r.vocab / vocab)) / 2)
    model = work.model.replace(dim=best.dim, vocab_size=best.vocab, head_dim=64)
    alike = replace(work, model=model, batch=1, seq_len=best.rows, layout=MeshLayout())
    head = _head_products(alike, gpu, 1)
    return best.seconds / (head + _loss_bytes(alike, gpu) / stream_rate(gpu))


def _optimizer_s(work: Workload, gpu: Gpu) -> float:
    """AdamW reads four numbers and writes three, in 8 bits 16 bytes in all; clipping reads one and
    scales it; the update ratio copies the weights and reads both."""
    sizes = sizes_of(work.model)
    owners = work.layout.shard * work.layout.tensor
    by_muon = sizes.blocks if work.optimizer == "muon" else 0
    per_param = UPDATE_BYTES["adamw8bit" if work.optimizer.startswith("adamw8bit") else "adamw"]
    moved = per_param * (sizes.all - by_muon) + UPDATE_BYTES["muon"] * by_muon
    moved += (12 + (20 if work.measures_update else 0)) * sizes.all
    seconds = moved / owners / optimizer_rate(gpu)
    return seconds + (_muon_s(work, gpu) if by_muon else 0.0)


def _muon_s(work: Workload, gpu: Gpu) -> float:
    """Five steps of three products for each matrix (foundling/optim/muon.py), dealt out over all
    ranks, and the way to the owner and back: two bytes a number each."""
    seconds, layout = 0.0, work.layout
    dtype = "bf16" if "bf16" in gpu.peaks and gpu.name != "cpu" else "fp32"
    for (out, width), count in _products(work.model):
        small, large = sorted((out, width))
        once = 2 * product_seconds(gpu, dtype, small, small, large)
        once += product_seconds(gpu, dtype, small, small, small)
        seconds += 5 * count * once / layout.world
    if layout.world > 1:
        owners = layout.shard * layout.tensor
        ways = 1 if owners == 1 else 2  # a whole matrix is with its owner already
        link = gpu.link * K.link_share
        if layout.world > layout.per_node:
            link = min(link, gpu.network * K.network_share / layout.per_node)
        seconds += 2 * ways * sizes_of(work.model).blocks / owners / link
    return seconds


def _idle_s(work: Workload, gpu: Gpu, parts: dict[str, float]) -> float:
    """Seconds of a micro-step in which the GPU waits: between kernels, and for Python.

    Python queues the forward pass, then the backward pass; the GPU follows. So a micro-step ends
    with the slowest of three: all kernels, all launches, or the forward's launches and then the
    backward's kernels.
    """
    mode = "compiled" if work.compile else "eager"
    layers = work.model.layers
    again = len(recomputed_blocks(work.recompute, layers))
    if gpu.name == "cpu":
        # A CPU does one after the other.
        launches = layers * sum(CPU_LAUNCHES) + again * CPU_LAUNCHES[0]
        return launches * launch_seconds(gpu)
    forward, backward = _python_s(work, gpu)
    python_forward = layers * forward
    python_backward = layers * backward + again * forward * (work.recompute != "per-op")
    busy = sum(parts.values())
    gaps = (layers * sum(KERNELS[mode]) + again * KERNELS[mode][0]) * K.gap_s
    loss = parts["loss"]
    backward_busy = (busy - loss) * 2 / 3 + gaps * 2 / 3
    lasts = max(busy + gaps, python_forward + python_backward, python_forward + backward_busy)
    return lasts - busy


def _python_s(work: Workload, gpu: Gpu) -> tuple[float, float]:
    """Python's seconds for one block, forward and backward."""
    again = recomputed_blocks(work.recompute, work.model.layers)
    mode = "per-op" if work.recompute == "per-op" and again else "eager"
    if work.compile:
        mode = "compiled"
    elif gpu.ceilings is not None and mode in gpu.ceilings.blocks:
        return gpu.ceilings.blocks[mode]
    forward, backward = LAUNCHES[mode]
    return forward * launch_seconds(gpu), backward * launch_seconds(gpu)


# Seconds that GPUs spend talking, by the collective and the wires it crosses.
#
# A ring all-reduce of S bytes over n ranks moves 2 (n-1)/n S through every rank, a gather or
# scatter half of that (Patarasuk and Yuan 2009); within a node over the GPU's link, across nodes
# through the node's adapters, which its GPUs share. Every hop waits: gathers and scatters are rings
# and have as many hops as ranks, an all-reduce may go up and down a tree instead. Traffic of
# gradients and gathered weights overlaps with the backward pass up to a stated share; tensor
# parallelism's lies between products and hides nowhere.

BUCKET_BYTES = 25e6
"""Gradients that DDP sums at once."""


@dataclass(frozen=True, kw_only=True)
class Talk:
    """Seconds of communication in one step, before anything is hidden."""

    gradients: float
    """DDP's and HSDP's all-reduce, FSDP's reduce-scatter: overlaps with the backward pass."""
    gathers: float
    """FSDP's all-gather of weights for each block: overlaps with the block before."""
    tensor: float
    """Between products: does not hide."""
    ends: float
    """Of the above, what has nothing to hide behind: the first gather and the last gradients."""


def talk(work: Workload, gpu: Gpu) -> Talk:
    """What a step of this layout says to the other GPUs."""
    layout, layers, degree = work.layout, work.model.layers, work.layout.tensor
    mine = sizes_of(work.model).all / degree  # parameters that a tensor-parallel rank has a part in
    link, per_gpu = gpu.link * K.link_share, gpu.network * K.network_share / layout.per_node
    gradients = gathers = tensor = ends = 0.0
    if layout.shard > 1:
        # FSDP: each block's weights gathered forward and backward, its gradients scattered.
        nodes = -(-layout.shard * degree // layout.per_node)
        # One node needs each byte once and passes it on inside, so its adapters work together;
        # tensor-parallel neighbours gather different bytes and share them.
        between = per_gpu * max(1, layout.per_node // degree)
        once = (
            (layout.shard - 1) / layout.shard * mine / (min(link, between) if nodes > 1 else link)
        )
        wait = (2 * layers + 2) * ring_s(layout.shard, nodes)
        gathers = work.accumulation * (2 * work.width * once + wait)
        gradients = work.accumulation * (4 * once + wait / 2)
        times = (layers + 1) * work.accumulation
        ends = gathers / (2 * times) + gradients / times
    if layout.replicate > 1:
        # DDP and HSDP: gradients summed over the replicas, a bucket at a time.
        ranks, speed = layout.replicate, link
        if layout.world > layout.per_node:
            together = min(link, per_gpu * layout.per_node / degree)
            speed = together if layout.shard == 1 else per_gpu
        share = 4 * mine / layout.shard
        buckets = max(1.0, share / BUCKET_BYTES)
        # A group has a rank in every node, or in as many as it has ranks.
        wait = buckets * all_reduce_s(ranks, min(ranks, layout.nodes))
        summed = 2 * (ranks - 1) / ranks * share / speed + wait
        gradients, ends = gradients + summed, ends + summed / buckets
    if degree > 1:
        # Two all-reduces a block forward and two backward (Shoeybi et al. 2019), and the forward's
        # again where a block is recomputed.
        size = work.width * work.positions * work.model.dim
        times = layers * (6 if work.recompute == "all" else 4)
        each = 2 * (degree - 1) / degree * size / link + all_reduce_s(degree, 1)
        tensor = work.accumulation * times * each
    return Talk(gradients=gradients, gathers=gathers, tensor=tensor, ends=ends)


def ring_s(ranks: int, nodes: int) -> float:
    """Seconds that a gather or scatter waits, in addition to its bytes: a hop for every other rank,
    of which one a node leaves it."""
    between = nodes - 1
    return K.latency_s + between * K.hop_between_s + (ranks - 1 - between) * K.hop_inside_s


def all_reduce_s(ranks: int, nodes: int) -> float:
    """Seconds that an all-reduce waits: round the ring twice, or up a tree of nodes and down."""
    ring = 2 * ring_s(ranks, nodes) - K.latency_s
    inside = (-(-ranks // nodes) - 1) * K.hop_inside_s
    tree = K.latency_s + 2 * (inside + math.ceil(math.log2(nodes)) * K.hop_between_s)
    return min(ring, tree)


# Where the time of a run goes: its start, compilation, steps, saves and evaluations.
#
# Steps alone are the training time that hours and dollars are told of; the rest stands beside them,
# because a short run may spend more on it. Tasks (`eval.tasks`) are measured and not planned: how
# long they are is in their files.


@dataclass(frozen=True, kw_only=True)
class Wall:
    """Seconds of one process that trains from the first step to the last."""

    start_s: float
    """From the start of the process to the first step: imports, data, weights, choices."""
    compile_s: float
    """What the first step takes beyond an ordinary one."""
    train_s: float
    """All steps, as ordinary ones."""
    save_s: float
    """Training stands still for a save, or the end of the run waits for the last one."""
    eval_s: float
    """Held-out scores and samples."""


def start_s(device: str) -> float:
    """Until the first step, on a device of this type."""
    return K.start_cuda_s if device == "cuda" else K.start_s


def compile_s(device: str, mode: str) -> float:
    """By train.compile as it was decided; with nothing compiled before."""
    if mode == "off":
        return 0.0
    if device != "cuda":
        return K.compile_cpu_s
    return K.compile_model_s if mode == "model" else K.compile_blocks_s


def plan_wall(
    config: RunConfig,
    horizon: Horizon,
    step_seconds: Sequence[float],
    saving: Saving,
    *,
    device: str,
) -> Wall:
    """Seconds by part; `step_seconds` has one for each phase."""
    steps, clocks = horizon.steps, config.eval
    mode = compile_on(config.train, config.parallel.tensor, on_cuda=device == "cuda")
    saves = len(_saved_steps(config, steps))
    still = saving.stall_s + K.save_s
    at_once = saving.write_s if config.checkpoint.background else 0.0
    pairs = zip(horizon.phases, step_seconds, strict=True)
    # A forward pass is a third of a step's work, and one process scores what the ranks share.
    token_s = step_seconds[0] * horizon.data_ranks / horizon.positions_per_step / 3
    sample_s = SAMPLE_TOKENS * config.model.layers * LAUNCHES["eager"][0] * K.launch_s
    samples = _times(steps, clocks.every) if clocks.prompts else 0
    return Wall(
        start_s=start_s(device),
        compile_s=compile_s(device, mode),
        train_s=sum(phase.steps * seconds for phase, seconds in pairs),
        save_s=saves * (still + saving.write_s - at_once) + at_once,
        eval_s=scored_tokens(config, steps) * token_s + samples * sample_s,
    )


def _times(steps: int, every: int) -> int:
    """How often a clock strikes, the last step included."""
    return math.ceil(steps / every) if every else 0


def _saved_steps(config: RunConfig, steps: int) -> set[int]:
    """A save goes before every evaluation (train/loop.py)."""
    tasks = config.eval.tasks_every if config.eval.tasks else 0
    clocks = (config.checkpoint.every, config.eval.every, tasks)
    return {steps}.union(*(range(every, steps, every) for every in clocks if every))


def scored_tokens(config: RunConfig, steps: int) -> int:
    """Held-out tokens read by all evaluations; the last one reads everything."""
    times, limit = _times(steps, config.eval.every), config.eval.tokens
    if not times:
        return 0
    manifests = [Manifest.load(Path(name)) for name in all_sources(config.data)]
    held = [sum(shard.tokens for shard in manifest.val) for manifest in manifests] or [limit]
    each = sum(min(limit or tokens, tokens) for tokens in held)
    return (times - 1) * each + sum(held)
