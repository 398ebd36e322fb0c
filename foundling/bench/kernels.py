"""Benchmarks of kernels at a model's shapes: attention, loss, optimizer; speed and error of each.

A kernel is launched and not looked up: what a build of torch says it has, and what runs at a shape,
differ. Errors are against float64 on a slice, relative to the largest value.

Shapes: B rows, H query heads, K key/value heads, T time, D head width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foundling.bench.batch_size import alone, refuse_unknown
from foundling.config.errors import ConfigError, UserError
from foundling.config.optim import OptimConfig, OptimizerName
from foundling.config.run import RunConfig
from foundling.model.kernels.attention_backends import KERNELS, TORCH, Kernel, MaskSpec, dense_mask
from foundling.model.transformer import Transformer
from foundling.optim.optimizer import build_optimizer, set_lr
from foundling.runtime.console import size, table
from foundling.runtime.device import (
    DeviceChoice,
    choose_device,
    device_name,
    free_cached_memory,
    memory_usage,
    prepare_device,
    reset_peak_memory,
)
from foundling.train.autotune.attention import AttentionShape, reference
from foundling.train.autotune.harness import IN_A_ROW_S, median_seconds, pairs_with_float64
from foundling.train.autotune.loss import (
    CHECKED_ROWS,
    Loss,
    available_losses,
    float64_check_inputs,
    forward_backward,
    plain_loss_fn,
    random_inputs,
)

DOCUMENTS = (0.1, 0.15, 0.3)
"""Where a row's documents end, as shares of it: four of uneven length."""
Figures = dict[str, float]
Work = Callable[[], Figures]


@dataclass(frozen=True)
class KernelTiming:
    """One way to compute a part of a step."""

    name: str
    refusal: str = ""
    """Why there are no figures."""
    figures: Figures = field(default_factory=dict)
    """Seconds, rates, bytes and errors by name (FIGURES)."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"name": self.name, "refusal": self.refusal, **self.figures}


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _relative(error: float) -> str:
    return f"{error:.1e}"


FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "seconds": ("ms", _milliseconds),
    "forward_s": ("forward ms", _milliseconds),
    "backward_s": ("backward ms", _milliseconds),
    "flops_per_s": ("TFLOP/s", lambda rate: f"{rate / 1e12:.3g}"),
    "memory": ("memory", size),
    "error": ("error", _relative),
    "loss_error": ("loss error", _relative),
    "grad_error": ("gradient error", _relative),
    "ns_per_param": ("ns a parameter", lambda nanoseconds: f"{nanoseconds:.4f}"),
    "state_bytes": ("state", size),
    "state_per_param": ("bytes a parameter", lambda count: f"{count:.2f}"),
}
"""What is measured: its column, and how it is written there."""
NOTES = {
    "attention": "TFLOP/s: 14 D for every pair that may be seen, both passes; error: largest of"
    " output and gradients against float64 on a slice, relative to the largest value",
    "loss": "TFLOP/s: 6 x rows x width x vocabulary, forward and backward; errors against float64"
    f" on {CHECKED_ROWS} rows",
    "optimizer": "one update of every parameter with random gradients",
}


def describe_kernels(part: str, rows: Sequence[KernelTiming], config: RunConfig) -> list[str]:
    """The table as text, of one part's rows."""
    choice = choose_device(config.train.device, config.train.dtype)
    model, train = config.model, config.train
    measured = {name for row in rows for name in row.figures}
    columns = {name: FIGURES[name] for name in FIGURES if name in measured}
    lines = [[part, *(head for head, _ in columns.values())]]
    for row in (row for row in rows if not row.refusal):
        cells = [
            written(row.figures[name]) if name in row.figures else "-"
            for name, (_, written) in columns.items()
        ]
        lines.append([row.name, *cells])
    return [
        f"{device_name(choice.device)}, {choice.dtype}: {train.batch_size} rows of {train.seq_len},"
        f" {model.heads} heads over {model.num_kv_heads} of width {model.head_width}, width"
        f" {model.dim}, vocabulary {model.vocab_size:,}",
        *(table(lines) if len(lines) > 1 else []),
        *(f"{row.name}: {row.refusal}" for row in rows if row.refusal),
        NOTES[part],
    ]


def _measured(ways: Mapping[str, Work | str]) -> Iterator[KernelTiming]:
    """The figures of each way; one that is not there, or fails, says why."""
    for name, way in ways.items():
        refusal, figures = "", Figures()
        try:
            if isinstance(way, str):
                refusal = way
            else:
                figures = way()
        except (UserError, RuntimeError, ImportError) as error:  # no such kernel, no room
            refusal = str(error).splitlines()[0][:160]
        yield KernelTiming(name, refusal, figures)
        free_cached_memory()


def bench_attention(
    config: RunConfig, *, only: tuple[str, ...] = (), seconds: float = 0.2
) -> Iterator[KernelTiming]:
    """Every kernel that can be launched, causal, per document and windowed; a mistake is refused
    when it is called."""
    alone(config, words=False)
    choice = prepare_device(config.train)
    kernels = _kernels(choice)
    refuse_unknown(only, kernels)
    return _measured(
        {
            f"{mask}, {name}": partial(_measured_attention, config, choice, spec, kernel, seconds)
            for mask, spec in _specs(config, choice.device).items()
            for name, kernel in kernels.items()
            if not only or name in only
        }
    )


def best_attention(
    config: RunConfig,
    choice: DeviceChoice,
    seconds: float = 0.1,
    documents: NDArray[np.int32] | None = None,
) -> float:
    """FLOP/s, forward and backward, of the fastest kernel at the causal shape, or with the
    documents [T] in every row; 0 if none runs."""
    spec = MaskSpec()
    slow: tuple[str, ...] = ("math", "flex")
    if documents is not None:
        row = torch.as_tensor(documents, device=choice.device)
        spec = MaskSpec(row.expand(config.train.batch_size, -1).contiguous())
        slow = ("math",)  # flex is a good one where there is a mask
    ways = {
        name: partial(_measured_attention, config, choice, spec, kernel, seconds, check=False)
        for name, kernel in _kernels(choice).items()
        if name not in slow or choice.device.type != "cuda"
    }
    return max((row.figures.get("flops_per_s", 0.0) for row in _measured(ways)), default=0.0)


def _kernels(choice: DeviceChoice) -> dict[str, Kernel]:
    """Those that can be named here; what torch picks by itself is one of the others on CUDA."""
    if choice.device.type == "cuda":
        return {name: kernel for name, kernel in KERNELS.items() if name != TORCH.name}
    return {name: KERNELS[name] for name in ("torch", "math")}


def _specs(config: RunConfig, device: torch.device) -> dict[str, MaskSpec]:
    rows, width = config.train.batch_size, config.train.seq_len
    edges = torch.tensor([int(share * width) for share in DOCUMENTS], device=device)
    numbers = (torch.arange(width, device=device)[:, None] >= edges).sum(1).to(torch.int32)
    window = max(config.model.windows, default=0) or max(1, width // 4)
    return {
        "causal": MaskSpec(None, 0),
        "documents": MaskSpec(numbers.expand(rows, -1).contiguous(), 0),
        f"window {window}": MaskSpec(None, window),
    }


def _measured_attention(
    config: RunConfig,
    choice: DeviceChoice,
    spec: MaskSpec,
    kernel: Kernel,
    seconds: float,
    *,
    check: bool = True,
) -> Figures:
    """Both passes count 14 D for each pair of a query and a key that it may see."""
    device = choice.device
    if refusal := kernel.refusal(spec, 0.0):
        raise ConfigError(refusal)
    shape = AttentionShape.of(config.model, config.train.batch_size, config.train.seq_len)
    q, k, v = shape.random_inputs(device, choice.dtype)
    grad, seen = torch.randn_like(q), kernel.mask(spec, q.shape[2], device)

    def both() -> None:
        q.grad = k.grad = v.grad = None
        kernel.attend(q, k, v, seen, 0.0).backward(grad)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def forward() -> None:
        kernel.attend(q, k, v, seen, 0.0)

    def time(work: Callable[[], None]) -> float:
        return median_seconds(work, device, seconds, at_least=IN_A_ROW_S)

    forward_s, both_s = time(forward), time(both)
    # Once more after it: a change of clock or load in between must not take all of the difference.
    forward_s = min(forward_s, time(forward))
    pairs = _pairs(spec, config) * config.train.batch_size * config.model.heads
    found = {"forward_s": forward_s, "flops_per_s": 14 * pairs * config.model.head_width / both_s}
    if both_s > forward_s:  # else the passes cannot be told apart
        found["backward_s"] = both_s - forward_s
    return {**found, "error": _error(kernel, spec, q, k, v)} if check else found


def _pairs(spec: MaskSpec, config: RunConfig) -> float:
    """Pairs of a query and a key that it may see, of one row and head."""
    width = config.train.seq_len
    documents = None if spec.documents is None else spec.documents[:1].cpu()
    mask = dense_mask(MaskSpec(documents, spec.window), width, torch.device("cpu"))
    return width * (width + 1) / 2 if mask is None else float(mask.sum())


def _error(kernel: Kernel, spec: MaskSpec, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Of the first row and the heads that share the first key head."""
    groups = q.shape[1] // k.shape[1]
    documents = None if spec.documents is None else spec.documents[:1]
    slices = (q[:1, :groups], k[:1, :1], v[:1, :1])
    one = MaskSpec(documents, spec.window)
    seen = kernel.mask(one, q.shape[2], q.device)
    return max(
        _gap(found, wanted, least=1e-12)
        for found, wanted in pairs_with_float64(
            lambda q, k, v: kernel.attend(q, k, v, seen, 0.0),
            lambda q, k, v: reference(one, q, k, v),
            [part.detach().clone().requires_grad_() for part in slices],
        )
    )


def _gap(found: Tensor, wanted: Tensor, least: float = 0.0) -> float:
    """Largest difference, relative to the largest value."""
    return float((found.double() - wanted).abs().max() / wanted.abs().max().clamp(min=least))


# Ways to compute the head's cross-entropy and gradients.
#
# plain    logits of all rows, then cross-entropy
# fused    ours: in chunks, gradients made in the forward pass
# torch    F.linear_cross_entropy, where torch has it
# liger    liger-kernel's, where it is installed (CUDA)


def losses(config: RunConfig, choice: DeviceChoice) -> dict[str, Loss | str]:
    """Every way by name, or why it is not there."""
    found: dict[str, Loss | str] = {"plain": plain_loss_fn(config.model, config.train)}
    for here in available_losses(config.model, config.train, config.parallel, choice):
        found |= {str(name): way for name, way in here.items()}
    return found


def bench_loss(
    config: RunConfig, *, only: tuple[str, ...] = (), seconds: float = 0.5
) -> Iterator[KernelTiming]:
    """Measure each way at the config's rows, width and vocabulary."""
    alone(config)
    choice = prepare_device(config.train)
    ways = losses(config, choice)
    refuse_unknown(only, ways)
    return _measured(
        {
            name: loss
            if isinstance(loss, str)
            else partial(_measured_loss, config, choice, loss, seconds)
            for name, loss in ways.items()
            if not only or name in only
        }
    )


def _measured_loss(config: RunConfig, choice: DeviceChoice, loss: Loss, seconds: float) -> Figures:
    """Forward and backward, 6 N V C; memory is the peak beyond inputs and gradients."""
    rows = config.train.batch_size * config.train.seq_len
    given = random_inputs(config.model, choice, rows)

    def work() -> list[Tensor]:
        return forward_backward(loss, choice, given)

    held = work()  # gradients too are there between two steps
    before = memory_usage(choice.device)["memory_allocated"]
    del held
    reset_peak_memory(choice.device)
    work()
    peak = memory_usage(choice.device)["memory_peak"] - before
    took = median_seconds(work, choice.device, seconds)
    pairs = pairs_with_float64(*float64_check_inputs(loss, config.model, config.train, choice))
    loss_error, *errors = (_gap(found, wanted) for found, wanted in pairs)
    return {
        "seconds": took,
        "flops_per_s": 6 * rows * config.model.dim * config.model.vocab_size / took,
        **({"memory": peak} if choice.device.type == "cuda" else {}),
        "loss_error": loss_error,
        "grad_error": max(errors),
    }


# The update alone, of a model's own parameters with random gradients.
#
# AdamW as a loop, in multi-tensor calls and fused, and every optimizer that `optim.name` offers,
# made by the trainer's own builder. State is counted in bytes of what the optimizer keeps.

Make = Callable[[Transformer], torch.optim.Optimizer]


def optimizers(config: RunConfig) -> dict[str, Make]:
    """Every optimizer by name."""
    optim = config.optim

    def adamw(**how: bool) -> Make:
        return lambda model: torch.optim.AdamW(
            model.parameters(),
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            **how,
        )

    found = {
        "adamw loop": adamw(foreach=False, fused=False),
        "adamw foreach": adamw(foreach=True),
        "adamw fused": adamw(fused=True),
    }
    for name in get_args(OptimizerName):
        found[f"optim.name {name}"] = _built(optim.replace(name=name))
    return found


def _built(optim: OptimConfig) -> Make:
    return lambda model: build_optimizer(model.named_parameters(), optim)


def bench_optimizer(
    config: RunConfig, *, only: tuple[str, ...] = (), seconds: float = 0.5
) -> Iterator[KernelTiming]:
    """Measure each; one that cannot be built says why."""
    alone(config, rows=False)
    choice = prepare_device(config.train)
    there = optimizers(config)
    refuse_unknown((word for word in only if not any(word in name for name in there)), there)
    return _measured(
        {
            name: partial(_measured_optimizer, config, choice, make, seconds)
            for name, make in there.items()
            if not only or any(word in name for word in only)
        }
    )


def _measured_optimizer(
    config: RunConfig, choice: DeviceChoice, make: Make, seconds: float
) -> Figures:
    with torch.device(choice.device):
        model = Transformer(config.model)
    count = 0
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter).mul_(1e-3)
        count += parameter.numel()
    optimizer = make(model)
    if "lr_scale" in optimizer.param_groups[0]:
        set_lr(optimizer, config.optim.lr)
    took = median_seconds(optimizer.step, choice.device, seconds)
    held = sum(_bytes(state) for state in optimizer.state.values())
    return {
        "seconds": took,
        "ns_per_param": took / count * 1e9,
        "state_bytes": held,
        "state_per_param": held / count,
    }


def _bytes(state: Any) -> int:
    """Of everything in an optimizer's state, inside of a quantised tensor too."""
    if isinstance(state, Tensor):
        if hasattr(state, "__tensor_flatten__"):
            names, _ = state.__tensor_flatten__()
            return sum(_bytes(getattr(state, name)) for name in names)
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        return sum(_bytes(value) for value in state.values())
    return 0


BENCHES = {"attention": bench_attention, "loss": bench_loss, "optimizer": bench_optimizer}
"""The parts of `foundling bench kernels`."""
