"""Autotuning of attention: each backend launched as the run would, checked and timed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foundling.config.data import DataConfig, phase_mixtures
from foundling.config.errors import ConfigError
from foundling.config.model import ModelConfig
from foundling.config.train import TrainConfig
from foundling.model.kernels.attention_backends import KERNELS, TORCH, Kernel, MaskSpec, dense_mask
from foundling.parallel.compile import use_cache_folder
from foundling.plan.horizon import micro_rows
from foundling.runtime.console import first_line
from foundling.runtime.device import synchronise
from foundling.train.autotune.harness import (
    IN_A_ROW_S,
    Candidate,
    candidate_seconds,
    max_relative_error,
    median_seconds,
    pick,
    try_candidate,
)

UNSTEADY = "its gradients differ from one launch to the next"
"""Why a deterministic run leaves a kernel out."""
NOT_REPEATED = "torch has no way to repeat it bit by bit (train.deterministic)"
"""Likewise, where torch knows without a launch: of cuDNN's attention it does."""
DECLINED = ("No available kernel", "does not have a deterministic implementation")
"""Texts of torch errors for a kernel that cannot be deterministic."""
REPEATS = 5
"""Launches that must agree where a run must repeat itself."""
MOST_EXACT = 2048
"""Positions of a row that is computed in float64."""


@dataclass(frozen=True)
class AttentionShape:
    """Attention as a run asks for it."""

    rows: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    dropout: float

    @classmethod
    def of(cls, model: ModelConfig, rows: int, width: int) -> "AttentionShape":
        """A model's, for a micro-batch."""
        return cls(rows, width, model.heads, model.num_kv_heads, model.head_width, model.dropout)

    def random_inputs(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """q, k and v with gradients required, in the memory layout of a projection's output."""
        generator = torch.Generator(device).manual_seed(0)
        return [
            torch.randn(
                *(self.rows, self.width, count, self.head_dim),
                device=device,
                dtype=dtype,
                generator=generator,
            )
            .transpose(1, 2)
            .requires_grad_()
            for count in (self.heads, self.kv_heads, self.kv_heads)
        ]


def make_forward_backward(
    kernel: Kernel, shape: AttentionShape, spec: MaskSpec, device: torch.device, dtype: torch.dtype
) -> Callable[[], list[Tensor]]:
    """A function that launches forward and backward, for the result and the gradients."""
    q, k, v = shape.random_inputs(device, dtype)
    mask = kernel.mask(spec, shape.width, device)
    seed: list[Tensor] = []

    def forward_backward() -> list[Tensor]:
        out = kernel.attend(q, k, v, mask, shape.dropout)
        if not seed:
            seed.append(torch.randn_like(out))
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), seed[0])]

    return forward_backward


def _seconds(
    kernel: Kernel,
    shape: AttentionShape,
    spec: MaskSpec,
    device: torch.device,
    dtype: torch.dtype,
    layers: int,
) -> float:
    """Seconds of a launch and of a layer's share of the mask. Short launches come in a row, as in a
    compiled step: a kernel that Python takes long to launch is not slower for it there."""
    forward_backward = make_forward_backward(kernel, shape, spec, device, dtype)
    mask_s = median_seconds(lambda: kernel.mask(spec, shape.width, device), device, 0.0)
    return candidate_seconds(forward_backward, device, at_least=IN_A_ROW_S) + mask_s / layers


def refusal_at(
    kernel: Kernel,
    at: Sequence[tuple[AttentionShape, MaskSpec]],
    device: torch.device,
    dtype: torch.dtype,
) -> str:
    """Why a kernel cannot be used at some of these, each of which is launched; empty if it can."""
    for shape, spec in at:
        if spec.documents is None and spec.window >= shape.width:
            continue  # no mask at this length, and another kernel's work
        refusal = kernel.refusal(spec, shape.dropout) or ""
        try:
            if not refusal:
                make_forward_backward(kernel, shape, spec, device, dtype)()
                synchronise(device)
        except Exception as error:  # whatever a kernel that does not fit throws
            refusal = first_line(error)
        if refusal:
            window = f" in a window of {spec.window}" if spec.window else ""
            return f"at {shape.rows} rows of {shape.width}{window}: {refusal}"
    return ""


def try_kernel(
    kernel: Kernel,
    shape: AttentionShape,
    spec: MaskSpec,
    device: torch.device,
    dtype: torch.dtype,
    *,
    layers: int = 1,
) -> Candidate:
    """Check a kernel on a row in float64 and time it; a mask is made once for all `layers`."""
    if refusal := kernel.refusal(spec, shape.dropout):
        return Candidate(kernel.name, refusal=refusal)
    must_repeat = torch.are_deterministic_algorithms_enabled()

    def seconds() -> float:
        if must_repeat and not repeats(kernel, shape, spec, device, dtype):
            raise RuntimeError(UNSTEADY)
        return _seconds(kernel, shape, spec, device, dtype, layers)

    found = try_candidate(
        kernel.name, lambda: attention_error(kernel, shape, spec, device, dtype), seconds
    )
    if must_repeat and any(words in found.refusal for words in DECLINED):
        return Candidate(kernel.name, refusal=NOT_REPEATED)
    return found


def repeats(
    kernel: Kernel, shape: AttentionShape, spec: MaskSpec, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether result and gradients are the same bits in a few launches, without dropout."""
    forward_backward = make_forward_backward(
        kernel, replace(shape, dropout=0.0), spec, device, dtype
    )
    first = forward_backward()
    again = (zip(first, forward_backward(), strict=True) for _ in range(REPEATS - 1))
    return all(torch.equal(a, b) for pairs in again for a, b in pairs)


def attention_error(
    kernel: Kernel, shape: AttentionShape, spec: MaskSpec, device: torch.device, dtype: torch.dtype
) -> float:
    """Largest relative error, in norm, of result and gradients against attention in float64."""
    # One row and one group of heads, and no long rows: in float64 every score is kept.
    every = max(1, -(-shape.width // MOST_EXACT))
    heads, width = shape.heads // shape.kv_heads, shape.width // every
    one = replace(shape, rows=1, width=width, heads=heads, kv_heads=1, dropout=0.0)
    documents = None
    if spec.documents is not None:  # as many of them, in the shorter row
        documents = spec.documents[:1, ::every][:, :width].contiguous()
    spec = MaskSpec(documents, -(-spec.window // every))
    # One head alone lies in memory one way, whatever strides it is given.
    inputs = [x.detach().contiguous().requires_grad_() for x in one.random_inputs(device, dtype)]
    mask = kernel.mask(spec, one.width, device)
    return max_relative_error(
        lambda q, k, v: kernel.attend(q, k, v, mask, 0.0),
        lambda q, k, v: reference(spec, q, k, v),
        inputs,
    )


def reference(spec: MaskSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention written out: scores, softmax, sum."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    width = q.shape[2]
    mask = dense_mask(spec, width, q.device)
    if mask is None:
        mask = torch.ones(width, width, dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    mixed: Tensor = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
    return mixed


# Which kernels a run uses: found by launching them at the run's own shapes, once, with a reason.
#
# They are timed at the first phase's longest rows and launched at every other length that phases
# and buckets will bring. A kernel that is named and cannot be launched, or computes nonsense, is an
# error (and one that no layer would use, a warning); one that is left to `auto` is the fastest that
# can, forward and backward together, and what is there and fails is a warning. A deterministic run
# takes the first in their order, since a clock would let two equal runs differ. The choice is
# written into the run's config, and a resume is held to it.

DEVICE_INDEPENDENT = ("auto", "torch", "math")
"""What may be named whatever the device and the layers are."""
HALF_PRECISION_ONLY = ("flash4", "flash3", "cudnn", "band", "flash")
"""Those that take bf16 and fp16 alone, on a GPU."""
MIN_CAPABILITY = (9, 0)
"""Compute capability from which the kernels of other packages were seen to be faster."""
FALLBACK = "math"
"""Materialises the score matrix; tried last."""


def choose_attention_kernels(
    model: ModelConfig,
    train: TrainConfig,
    data: DataConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[dict[str, Any], list[str]]:
    """The attention kernels by field of `train.kernels`, and a line about each that was chosen."""
    if device.type != "cuda":
        return _leave_to_torch(train), []
    windows = {model.window_of(layer) for layer in range(model.layers)}
    documents = data.document_mask
    asked: dict[str, set[int]] = {
        "attention": set() if documents else windows & {0},
        "attention_masked": windows if documents else windows - {0},
    }
    chosen: dict[str, Any] = {}
    lines = []
    for field, seen in asked.items():
        wanted = getattr(train.kernels, field)
        if not seen:
            chosen[field] = "torch"
            if wanted not in DEVICE_INDEPENDENT:
                lines.append(_no_effect_warning(field, wanted))
            continue
        at = [
            (shape, MaskSpec(_documents(shape, device) if documents else None, window))
            for shape in shapes_of(model, train, data)
            for window in sorted(seen, reverse=True)
        ]
        if field == "attention_masked":
            use_cache_folder()  # flex is compiled
        name, why = choose_kernel(wanted, at, device, dtype, layers=model.layers)
        chosen[field] = name
        lines.append(f"{field.replace('attention_masked', 'masked attention')} by {name} ({why})")
        torch.cuda.empty_cache()
    return chosen, lines


def shapes_of(model: ModelConfig, train: TrainConfig, data: DataConfig) -> list[AttentionShape]:
    """Attention shapes of every phase and bucket; the first has the first phase's longest rows."""
    found = []
    for _, packing_spec in phase_mixtures(data, train.seq_len):
        units = max(micro_rows(train, packing_spec), 1)
        for edge in reversed(packing_spec.edges or (packing_spec.seq_len,)):
            rows = units * (packing_spec.rows_in(edge) if packing_spec.packing == "bucket" else 1)
            found.append(AttentionShape.of(model, rows, edge))
    return list(dict.fromkeys(found))


def _no_effect_warning(field: str, wanted: str) -> str:
    """A warning, and no refusal: the name may be the choice of the run that this one branched from,
    which had other layers."""
    other = "attention_masked" if field == "attention" else "attention"
    which = "without a mask" if field == "attention" else "with a mask of documents or a window"
    return (
        f"WARNING: train.kernels.{field} {wanted} has no effect, the model has no layer {which};"
        f" set train.kernels.{other}, or leave it at auto"
    )


def _leave_to_torch(train: TrainConfig) -> dict[str, Any]:
    """On a CPU there is one kernel, and torch finds it."""
    chosen: dict[str, Any] = {}
    for field in ("attention", "attention_masked"):
        wanted = getattr(train.kernels, field)
        if wanted not in DEVICE_INDEPENDENT:
            raise ConfigError(
                f"train.kernels.{field} {wanted} needs a CUDA device; set it to torch."
            )
        chosen[field] = "torch" if wanted == "auto" else wanted
    return chosen


def _documents(shape: AttentionShape, device: torch.device) -> Tensor:
    """Numbers of documents like a run's own: of uneven length, five and a bit to a row."""
    places = torch.arange(shape.width, device=device)
    return (places // max(shape.width // 5, 1)).expand(shape.rows, -1).contiguous()


def _is_expected(
    refused: Candidate, shape: AttentionShape, spec: MaskSpec, dtype: torch.dtype
) -> bool:
    """Whether this kernel was known not to work here: then leaving it out is no fallback."""
    not_there = KERNELS[refused.name].refusal(spec, shape.dropout) is not None
    too_wide = dtype == torch.float32 and refused.name in HALF_PRECISION_ONLY
    return not_there or too_wide or refused.refusal in (UNSTEADY, NOT_REPEATED)


def worth_installing(
    found: Sequence[Candidate], device: torch.device, dtype: torch.dtype
) -> list[str]:
    """Kernels that this GPU could launch if their package were here, each with the remedy."""
    if device.type != "cuda" or dtype == torch.float32 or torch.version.hip:
        return []
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return []
    return [f"not tried: {t.name}, {t.refusal}" for t in found if "pip install" in t.refusal]


def choose_kernel(
    wanted: str,
    at: Sequence[tuple[AttentionShape, MaskSpec]],
    device: torch.device,
    dtype: torch.dtype,
    *,
    layers: int = 1,
) -> tuple[str, str]:
    """Name of the kernel to use, and why: the fastest at the first of these shapes and masks that
    works at the others too."""
    (shape, spec), *others = at
    if wanted != "auto":
        kernel = KERNELS[wanted]
        refusal = try_kernel(kernel, shape, spec, device, dtype, layers=layers).refusal
        refusal = refusal or refusal_at(kernel, others, device, dtype)
        if refusal:
            such = "" if wanted == FALLBACK else f", such as {FALLBACK}"
            raise ConfigError(
                f"attention kernel {wanted} was asked for, now or when the run began, and cannot"
                f" be used: {refusal}; name another{such}, or lower train.batch_size if it is"
                " memory that it lacks."
            )
        return wanted, "asked for"
    first = [name for name in KERNELS if name not in (FALLBACK, TORCH.name)]
    if spec.is_plain:
        first.remove("flex")  # compiled for seconds, and never ahead without a mask
    found = [try_kernel(KERNELS[name], shape, spec, device, dtype, layers=layers) for name in first]
    working, why = pick(found)
    why = "; ".join((why, *worth_installing(found, device, dtype)))
    if failed := [t for t in found if t.refusal and not _is_expected(t, shape, spec, dtype)]:
        names = ", ".join(f"{t.name} ({t.refusal})" for t in failed)
        why = f"WARNING: without what is there and failed, {names}; {why}"
    reasons = [f"{t.name}: {t.refusal}" for t in found if t.refusal]
    for tried in working:
        refusal = refusal_at(KERNELS[tried.name], others, device, dtype)
        if not refusal:
            return tried.name, why
        reasons.append(f"{tried.name}: {refusal}")
        why = f"WARNING: first would have been {tried.name}, which cannot be used: {refusal}; {why}"
    listed = "; ".join(reasons)
    return FALLBACK, f"WARNING: every score is kept, nothing faster works: {listed}"
