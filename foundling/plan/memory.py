"""Memory of one GPU by part and by moment: what is there at the end of the forward pass, when the
loss is turned round, when the backward pass begins in the last block and when it ends, when the
optimizer steps, when the run evaluates.

The parts do not simply add up: gradients grow while activations shrink, the copy for the update
ratio exists only at the step. So every moment lists what it holds, and the peak is one of them.

Weights, gradients and moments are counted from the parameters' shapes; activations by
activations.py; the loss from the chunks of foundling/model/loss.py. ZeRO's stages as Rajbhandari et
al. 2020 count them: FSDP divides weights, gradients and moments by the shard degree.
"""

from dataclasses import asdict, dataclass
from typing import Any

from foundling.config.sections import ModelConfig
from foundling.plan.activations import activation_bytes, backward_bytes
from foundling.plan.coefficients import COEFFICIENTS as K
from foundling.plan.float8 import check_float8, narrow_params
from foundling.plan.hardware import Gpu
from foundling.plan.moments import optimizer_bytes
from foundling.plan.work import Sizes, Work, sizes_of

CHUNK_LOGITS, MOST_CHUNK_LOGITS, CHUNK_SHARE, MOST_CHUNK_ROWS = 1 << 21, 1 << 30, 128, 8192
"""As in foundling/model/loss.py, which needs torch; a test keeps the two equal."""
OTHERS_CHUNK = 1 << 28
"""Logits that other projects' losses in chunks hold at once, about."""
MUON_STACK = 1 << 27
"""As in foundling/optim/muon.py, likewise."""


@dataclass(frozen=True, kw_only=True)
class Memory:
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


def plan_memory(work: Work, gpu: Gpu) -> Memory:
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
    needed = round(totals[moment] * (1 + K.slack)) + (context if gpu.name != "cpu" else 0)
    return Memory(
        moments=moments,
        peak=totals[moment],
        moment=moment,
        needed=needed,
        largest=_largest_tensor(work),
        capacity=gpu.memory,
        fits=needed <= gpu.memory,
    )


def _largest_tensor(work: Work) -> int:
    """Logits in fp32 where the loss is plain, else the stream through a feed-forward layer."""
    model, tensor = work.model, work.layout.tensor
    if work.loss == "plain":
        return 4 * work.positions * model.vocab_size // tensor
    return work.width * work.positions * max(model.ffn_dim, model.dim) // tensor


def _moments(work: Work, gpu: Gpu, sizes: Sizes) -> dict[str, dict[str, float]]:
    static = _static(work, sizes)
    gradients = _gradients(work, sizes)
    copies = _copies(work, sizes)
    kept = activation_bytes(work, gpu)
    head = _head(work, gpu, sizes)
    # Gradients of earlier micro-steps wait for the last; DDP's live in buckets for good.
    waiting = gradients if work.accumulation > 1 or work.layout.replicate > 1 else 0.0
    tables = work.weight_bytes * (sizes.tables + sizes.head) / _owners(work)
    moments = {
        "forward": {
            **static,
            **copies,
            "gradients": waiting,
            "activations": kept["kept"] + head["final norm"],
            "loss": head["forward"],
        },
        "loss": {
            **static,
            **copies,
            "gradients": waiting,
            "activations": kept["kept"],
            "loss": head["backward"],
        },
        "backward": {
            **static,
            **copies,
            # The head's gradient is there before any other.
            "gradients": max(waiting, work.weight_bytes * sizes.head / _owners(work)),
            "activations": kept["kept"],
            "made again": kept["made again"],
            "in flight": backward_bytes(work),
        },
        "backward's end": {
            **static,
            **copies,
            "gradients": gradients,
            "activations": kept["per block"],
            "made again": kept["made again"],
            "in flight": backward_bytes(work) + tables,
        },
        "step": {
            **static,
            "gradients": gradients,
            "update ratio": static["weights"] if work.measures_update else 0.0,
            "in flight": _step_bytes(work, sizes),
        },
    }
    if work.evaluates:
        moments["evaluation"] = {
            **static,
            **copies,
            "gradients": waiting if work.layout.replicate > 1 else 0.0,
            "in flight": backward_bytes(work),
            "loss": head["evaluation"],
        }
    if work.asks:
        # A micro-batch of prompts, whose keys and values wait for the answers.
        a_layer = 2 * work.width * work.model.num_kv_heads * work.model.head_width
        moments["tasks"] = {
            **static,
            **copies,
            "gradients": waiting if work.layout.replicate > 1 else 0.0,
            "key-value cache": float(a_layer * (work.model.layers + 1) * work.positions),
            "in flight": backward_bytes(work),
            "loss": head["evaluation"],
        }
    if work.sampled:
        model = work.model
        per_position = 2 * 4 * model.num_kv_heads * model.head_width * model.layers
        moments["sampling"] = {
            **static,
            "gradients": waiting if work.layout.replicate > 1 else 0.0,
            "key-value cache": float(per_position * work.sampled),
            "in flight": 4.0 * work.sampled * (model.ffn_dim * 3 + model.dim * 4),
        }
    return moments


def _step_bytes(work: Work, sizes: Sizes) -> float:
    """What the optimizer makes on the way. Muon: a stack of matrices of one shape ahead of their
    gradients in fp32, and five times in bf16 while it is orthogonalised; in most models a third of
    the matrices' numbers is of one shape."""
    if work.optimizer == "muon":
        return 14.0 * min(MUON_STACK, sizes.blocks / 3)
    return 2.0 * work.weight_bytes * sizes.largest_block / _owners(work)


def _owners(work: Work) -> int:
    """GPUs over which weights, gradients and moments are spread."""
    return work.layout.shard * work.layout.tensor


def _static(work: Work, sizes: Sizes) -> dict[str, float]:
    owners = _owners(work)
    return {
        "weights": work.weight_bytes * sizes.all / owners,
        "optimizer": optimizer_bytes(work.optimizer, sizes, work.weight_bytes) / owners,
    }


def _gradients(work: Work, sizes: Sizes) -> float:
    return work.weight_bytes * sizes.all / _owners(work)


def _copies(work: Work, sizes: Sizes) -> dict[str, float]:
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


def _head(work: Work, gpu: Gpu, sizes: Sizes) -> dict[str, float]:
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
        # Logits, their fp32 copy, log-softmax; then its gradient beside what it is made from.
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
