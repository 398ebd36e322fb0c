"""Which kernels a run uses: found by launching them at the run's own shapes, once, with a reason.

They are timed at the first phase's longest rows and launched at every other length that phases and
buckets will bring. A kernel that is named and cannot be launched, or computes nonsense, is an error
(and one that no layer would use, a warning); one that is left to `auto` is the fastest that can,
forward and backward together, and what is there and fails is a warning. A deterministic run takes
the first in their order, since a clock would let two equal runs differ. The choice is written into
the run's config, and a resume is held to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foundling.config.errors import ConfigError
from foundling.config.phases import mixes_of
from foundling.config.sections import RunConfig
from foundling.config.speed_checks import FLOAT8_SIDE
from foundling.model.kernels import KERNELS, TORCH, MaskSpec
from foundling.parallel.compiled import choose_cache
from foundling.plan.float8 import check_skip
from foundling.plan.horizon import micro_rows
from foundling.runtime.device import Choice
from foundling.runtime.log import warn
from foundling.train.compiling import choose_compile
from foundling.train.feed_forward import choose_feed_forward
from foundling.train.head_loss import choose_loss
from foundling.train.launches import (
    NOT_REPEATED,
    UNSTEADY,
    Shape,
    Tried,
    refusal_at,
    try_kernel,
)

CHOSEN = ("attention", "attention_masked", "feed_forward", "loss", "compile")
"""Fields of `train` that are found by measurement."""
ANYWHERE = ("auto", "torch", "math")
"""What may be named whatever the device and the layers are."""
NARROW = ("flash4", "flash3", "cudnn", "band", "flash")
"""Those that take bf16 and fp16 alone, on a GPU."""
HOPPER = (9, 0)
"""Compute capability from which the kernels of other packages were seen to be faster."""
LAST_RESORT = ("math",)
"""Keeps every score: asked only where nothing else can be launched."""


def settle(
    config: RunConfig, choice: Choice, *, steps: int = 0, before: RunConfig | None = None
) -> tuple[RunConfig, list[str]]:
    """The config with everything chosen that only this device can tell; `before` is what the run
    chose when it began, `steps` how long it is."""
    if before is not None:
        train = config.train
        again = {name: getattr(before.train, name) for name in CHOSEN}
        if again["feed_forward"] == "auto":  # the run is older than the choice
            again["feed_forward"] = "plain"
        if max(config.parallel.shard, config.parallel.tensor) > 1:
            again["loss"] = "fused"  # the others need the whole head
        kept = {name: value for name, value in again.items() if getattr(train, name) == "auto"}
        config = replace(config, train=replace(train, **kept))
    else:
        check_skip(config.model, config.train.float8_skip)
    _check_float8_rows(config)
    config, told = choose_kernels(config, choice.device, choice.dtype)
    config, line = choose_feed_forward(config, choice.device, choice.dtype)
    told += [line] if line else []
    config, line = choose_loss(config, choice)
    told += [line] if line else []
    mode, why = choose_compile(config, choice, steps)
    if config.train.compile == "auto":
        told.append(f"compile {mode} ({why})")
    return replace(config, train=replace(config.train, compile=mode)), told


def tell_settled(told: Sequence[str], tell: Callable[[str], None]) -> None:
    """Tell what was chosen; a fallback is a warning wherever it is told."""
    for line in told:
        warn(line) if "WARNING" in line else tell(line)


def _check_float8_rows(config: RunConfig) -> None:
    """A weight's gradient sums over the positions of a micro-batch, which are a side then."""
    for shape in shapes_of(config) if config.train.float8 != "none" else ():
        if shape.rows * shape.width % FLOAT8_SIDE:
            raise ConfigError(
                f"train.float8 {config.train.float8} needs micro-batches of a multiple of"
                f" {FLOAT8_SIDE} positions, and one has {shape.rows} rows of {shape.width}; change"
                " train.batch_size or train.seq_len, or set it to none."
            )


def choose_kernels(
    config: RunConfig, device: torch.device, dtype: torch.dtype
) -> tuple[RunConfig, list[str]]:
    """The config with its attention kernels filled in, and a line about each that was chosen."""
    if device.type != "cuda":
        return _leave_to_torch(config), []
    model = config.model
    windows = {model.window_of(layer) for layer in range(model.layers)}
    documents = config.data.document_mask
    asked: dict[str, set[int]] = {
        "attention": set() if documents else windows & {0},
        "attention_masked": windows if documents else windows - {0},
    }
    chosen: dict[str, Any] = {}
    told = []
    for field, seen in asked.items():
        wanted = getattr(config.train, field)
        if not seen:
            chosen[field] = "torch"
            if wanted not in ANYWHERE:
                told.append(_idle(field, wanted))
            continue
        at = [
            (shape, MaskSpec(_documents(shape, device) if documents else None, window))
            for shape in shapes_of(config)
            for window in sorted(seen, reverse=True)
        ]
        if field == "attention_masked":
            choose_cache()  # flex is compiled
        name, why = choose_kernel(wanted, at, device, dtype, layers=model.layers)
        chosen[field] = name
        told.append(f"{field.replace('attention_masked', 'masked attention')} by {name} ({why})")
        torch.cuda.empty_cache()
    return replace(config, train=replace(config.train, **chosen)), told


def shapes_of(config: RunConfig) -> list[Shape]:
    """Of every micro-batch that some phase or bucket brings; the first is the first phase's with
    the longest rows."""
    found = []
    for _, cut in mixes_of(config.data, config.train.seq_len):
        units = max(micro_rows(config.train, cut), 1)
        for edge in reversed(cut.edges or (cut.seq_len,)):
            rows = units * (cut.rows_in(edge) if cut.packing == "bucket" else 1)
            found.append(Shape.of(config.model, rows, edge))
    return list(dict.fromkeys(found))


def _idle(field: str, wanted: str) -> str:
    """A warning, and no refusal: the name may be the choice of the run that this one branched from,
    which had other layers."""
    other = "attention_masked" if field == "attention" else "attention"
    which = "without a mask" if field == "attention" else "with a mask of documents or a window"
    return (
        f"WARNING: train.{field} {wanted} has no effect, the model has no layer {which}; set"
        f" train.{other}, or leave it at auto"
    )


def _leave_to_torch(config: RunConfig) -> RunConfig:
    """On a CPU there is one kernel, and torch finds it."""
    for field in ("attention", "attention_masked"):
        if getattr(config.train, field) not in ANYWHERE:
            raise ConfigError(
                f"train.{field} {getattr(config.train, field)} needs a CUDA device; set it to"
                " torch."
            )
    names: dict[str, Any] = {
        field: "torch" if getattr(config.train, field) == "auto" else getattr(config.train, field)
        for field in ("attention", "attention_masked")
    }
    return replace(config, train=replace(config.train, **names))


def _documents(shape: Shape, device: torch.device) -> Tensor:
    """Numbers of documents like a run's own: of uneven length, five and a bit to a row."""
    places = torch.arange(shape.width, device=device)
    return (places // max(shape.width // 5, 1)).expand(shape.rows, -1).contiguous()


def _is_expected(refused: Tried, shape: Shape, spec: MaskSpec, dtype: torch.dtype) -> bool:
    """Whether nobody could have thought that it would work: then it is no fallback."""
    not_there = KERNELS[refused.name].refusal(spec, shape.dropout) is not None
    too_wide = dtype == torch.float32 and refused.name in NARROW
    return not_there or too_wide or refused.refusal in (UNSTEADY, NOT_REPEATED)


def worth_installing(found: Sequence[Tried], device: torch.device, dtype: torch.dtype) -> list[str]:
    """Kernels that this GPU could launch if their package were here, each with the remedy."""
    if device.type != "cuda" or dtype == torch.float32 or torch.version.hip:
        return []
    if torch.cuda.get_device_capability(device) < HOPPER:
        return []
    return [f"not tried: {t.name}, {t.refusal}" for t in found if "pip install" in t.refusal]


def choose_kernel(
    wanted: str,
    at: Sequence[tuple[Shape, MaskSpec]],
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
            such = "" if wanted in LAST_RESORT else f", such as {LAST_RESORT[0]}"
            raise ConfigError(
                f"attention kernel {wanted} was asked for, now or when the run began, and cannot"
                f" be used: {refusal}; name another{such}, or lower train.batch_size if it is"
                " memory that it lacks."
            )
        return wanted, "asked for"
    first = [name for name in KERNELS if name not in (*LAST_RESORT, TORCH.name)]
    if spec.is_plain:
        first.remove("flex")  # compiled for seconds, and never ahead without a mask
    found = [try_kernel(KERNELS[name], shape, spec, device, dtype, layers=layers) for name in first]
    working = [t for t in found if not t.refusal]
    why = "the first that repeats itself; deterministic runs are not chosen by a clock"
    if not torch.are_deterministic_algorithms_enabled():
        working.sort(key=lambda tried: tried.seconds)
        why = "launched: " + ", ".join(f"{t.name} {1e3 * t.seconds:.2f} ms" for t in working)
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
    told = "; ".join(reasons)
    return LAST_RESORT[0], f"WARNING: every score is kept, nothing faster works: {told}"
