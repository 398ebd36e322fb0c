"""Benchmarks of kernels at a model's shapes: attention, loss, optimizer; speed and error of
each."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foundling.bench.batch_size import alone, refuse_unknown
from foundling.config.errors import UserError
from foundling.config.optim import OptimConfig, OptimizerName
from foundling.config.run import RunConfig
from foundling.model.kernels.attention_backends import KERNELS, TORCH, Kernel, MaskSpec, dense_mask
from foundling.model.transformer import Transformer
from foundling.optim.optimizer import build_optimizer, set_lr
from foundling.runtime.console import size, table
from foundling.runtime.device import (
    DeviceChoice,
    choose,
    device_name,
    forget_peak,
    memory_now,
    prepare,
    release_memory,
)
from foundling.train.autotune.attention import AttentionShape, reference
from foundling.train.autotune.harness import IN_A_ROW_S, median_seconds
from foundling.train.autotune.loss import (
    CHECKED_ROWS,
    Loss,
    available_losses,
    exact_forward_backward,
    forward_backward,
    plain_loss_fn,
    random_inputs,
)

# A kernel is launched and not looked up: what a build of torch says it has, and what runs at a
# shape, differ. Errors are against the formula in float64 on one row and a few heads, of the output
# and of the three gradients, relative to the largest value of each.
#
# Shapes: B rows, H query heads, K key/value heads, T time, D head width.

DOCUMENTS = (0.1, 0.15, 0.3)
"""Where a row's documents end, as shares of it: four of uneven length."""
SECONDS = 0.2
"""Of timing for each measurement."""


@dataclass(frozen=True, kw_only=True)
class AttentionTiming:
    """One kernel under one mask."""

    mask: str
    kernel: str
    refusal: str = ""
    forward_s: float = 0.0
    backward_s: float = 0.0
    flops_per_s: float = 0.0
    """Both passes: 14 D for each pair of a query and a key that it may see."""
    error: float = 0.0
    """The largest of output and gradients, relative to the largest value of each."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def bench_attention(
    config: RunConfig, *, only: tuple[str, ...] = (), seconds: float = SECONDS
) -> Iterator[AttentionTiming]:
    """Every kernel that can be launched, causal, per document and windowed; a mistake is refused
    when it is called."""
    alone(config, words=False)
    choice = prepare(config.train)
    kernels = _kernels(choice)
    refuse_unknown(only, kernels)

    def rows() -> Iterator[AttentionTiming]:
        for mask, spec in _specs(config, choice.device).items():
            for name, kernel in kernels.items():
                if not only or name in only:
                    yield _measured_attention(config, choice, mask, spec, name, kernel, seconds)
                    release_memory()

    return rows()


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
    rows = (
        _measured_attention(config, choice, "", spec, name, kernel, seconds, check=False)
        for name, kernel in _kernels(choice).items()
        if name not in slow or choice.device.type != "cuda"
    )
    return max((row.flops_per_s for row in rows if not row.refusal), default=0.0)


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
    mask: str,
    spec: MaskSpec,
    name: str,
    kernel: Kernel,
    seconds: float,
    *,
    check: bool = True,
) -> AttentionTiming:
    device = choice.device
    if refusal := kernel.refusal(spec, 0.0):
        return AttentionTiming(mask=mask, kernel=name, refusal=refusal)
    try:
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
        # Once more after it: a change of clock or load in between must not take all of the
        # difference.
        forward_s = min(forward_s, time(forward))
        pairs = _pairs(spec, config) * config.train.batch_size * config.model.heads
        return AttentionTiming(
            mask=mask,
            kernel=name,
            forward_s=forward_s,
            backward_s=max(both_s - forward_s, 0.0),
            flops_per_s=14 * pairs * config.model.head_width / both_s,
            error=_error(kernel, spec, q, k, v, grad) if check else 0.0,
        )
    except (RuntimeError, NotImplementedError, ImportError) as error:  # no such kernel, no room
        return AttentionTiming(mask=mask, kernel=name, refusal=str(error).splitlines()[0][:120])


def _pairs(spec: MaskSpec, config: RunConfig) -> float:
    """Pairs of a query and a key that it may see, of one row and head."""
    width = config.train.seq_len
    documents = None if spec.documents is None else spec.documents[:1].cpu()
    mask = dense_mask(MaskSpec(documents, spec.window), width, torch.device("cpu"))
    return width * (width + 1) / 2 if mask is None else float(mask.sum())


def _error(kernel: Kernel, spec: MaskSpec, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> float:
    """Of the first row and the heads that share the first key head."""
    groups = q.shape[1] // k.shape[1]
    documents = None if spec.documents is None else spec.documents[:1]
    part = [q[:1, :groups], k[:1, :1], v[:1, :1]]
    seed = grad[:1, :groups]
    one = MaskSpec(documents, spec.window)
    seen = kernel.mask(one, q.shape[2], q.device)
    found = _with_gradients(lambda q, k, v: kernel.attend(q, k, v, seen, 0.0), part, seed)
    wide = [tensor.double() for tensor in part]
    wanted = _with_gradients(lambda q, k, v: reference(one, q, k, v), wide, seed.double())
    return max(
        float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-12))
        for a, b in zip(found, wanted, strict=True)
    )


def _with_gradients(attend: Any, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out: Tensor = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def describe_attention(rows: list[AttentionTiming], config: RunConfig) -> list[str]:
    """The table as text."""
    choice = choose(config.train.device, config.train.dtype)
    model, train = config.model, config.train
    lines = [["mask", "kernel", "forward ms", "backward ms", "TFLOP/s", "error"]]
    for row in rows:
        if not row.refusal:
            times = [f"{row.forward_s * 1e3:.3f}", "-"]
            if row.backward_s > 0:  # else the passes cannot be told apart
                times[1] = f"{row.backward_s * 1e3:.3f}"
            rate = f"{row.flops_per_s / 1e12:.2f}"
            lines.append([row.mask, row.kernel, *times, rate, f"{row.error:.1e}"])
    refused = [f"{row.mask}, {row.kernel}: {row.refusal}" for row in rows if row.refusal]
    return [
        f"{device_name(choice.device)}, {choice.dtype}: {train.batch_size} rows of {train.seq_len},"
        f" {model.heads} heads over {model.num_kv_heads}, width {model.head_width}",
        *(table(lines) if len(lines) > 1 else []),
        *refused,
        "TFLOP/s: 14 D for every pair that may be seen, both passes; error: largest of output and"
        " gradients against float64 on a slice, relative to the largest value",
    ]


# `foundling bench kernels --only loss`: ways to compute the head's cross-entropy and gradients.
#
# plain    logits of all rows, then cross-entropy
# fused    ours: in chunks, gradients made in the forward pass
# torch    F.linear_cross_entropy, where torch has it
# liger    liger-kernel's, where it is installed (CUDA)
#
# Errors are against float64 on a few rows: of the loss and of both gradients.


@dataclass(frozen=True, kw_only=True)
class LossTiming:
    """One way."""

    name: str
    refusal: str = ""
    seconds: float = 0.0
    """Forward and backward."""
    flops_per_s: float = 0.0
    """6 N V C over the seconds."""
    memory: int = 0
    """Bytes at the peak beyond inputs and gradients; CUDA only."""
    loss_error: float = 0.0
    """Relative."""
    grad_error: float = 0.0
    """Largest, relative to the largest value."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def losses(config: RunConfig, choice: DeviceChoice) -> dict[str, Loss | str]:
    """Every way by name, or why it is not there."""
    found: dict[str, Loss | str] = {"plain": plain_loss_fn(config.model, config.train)}
    for here in available_losses(config.model, config.train, config.parallel, choice):
        found |= {str(name): way for name, way in here.items()}
    return found


def bench_loss(
    config: RunConfig, *, only: tuple[str, ...] = (), seconds: float = 0.5
) -> Iterator[LossTiming]:
    """Measure each way at the config's rows, width and vocabulary."""
    alone(config)
    choice = prepare(config.train)
    ways = losses(config, choice)
    refuse_unknown(only, ways)

    def rows() -> Iterator[LossTiming]:
        for name, loss in ways.items():
            if only and name not in only:
                continue
            if isinstance(loss, str):
                yield LossTiming(name=name, refusal=loss)
                continue
            refusal = ""
            try:
                yield _measured_loss(config, choice, name, loss, seconds)
            except (RuntimeError, ImportError) as error:  # no room, or no kernel for this shape
                refusal = str(error).splitlines()[0][:120]
            if refusal:
                yield LossTiming(name=name, refusal=refusal)
            release_memory()

    return rows()


def _measured_loss(
    config: RunConfig, choice: DeviceChoice, name: str, loss: Loss, seconds: float
) -> LossTiming:
    rows = config.train.batch_size * config.train.seq_len
    dim, vocab = config.model.dim, config.model.vocab_size
    given = random_inputs(config.model, choice, rows)

    def work() -> list[Tensor]:
        return forward_backward(loss, choice, given)

    held = work()  # gradients too are there between two steps
    before = memory_now(choice.device)["memory_allocated"]
    del held
    forget_peak(choice.device)
    work()
    peak = memory_now(choice.device)["memory_peak"] - before
    took = median_seconds(work, choice.device, seconds)
    loss_error, grad_error = _errors(config, choice, loss)
    return LossTiming(
        name=name,
        seconds=took,
        flops_per_s=6 * rows * dim * vocab / took,
        memory=peak if choice.device.type == "cuda" else 0,
        loss_error=loss_error,
        grad_error=grad_error,
    )


def _errors(config: RunConfig, choice: DeviceChoice, loss: Loss) -> tuple[float, float]:
    found = forward_backward(loss, choice, random_inputs(config.model, choice))
    pairs = zip(found, exact_forward_backward(config.model, config.train, choice), strict=True)
    total, *grads = (float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)
    return total, max(grads)


def describe_loss(rows: list[LossTiming], config: RunConfig) -> list[str]:
    """The table as text."""
    choice = choose(config.train.device, config.train.dtype)
    lines = [["loss", "ms", "TFLOP/s", "memory", "loss error", "gradient error"]]
    for row in rows:
        if not row.refusal:
            rate, memory = f"{row.flops_per_s / 1e12:.3g}", size(row.memory) if row.memory else "-"
            errors = [f"{row.loss_error:.1e}", f"{row.grad_error:.1e}"]
            lines.append([row.name, f"{row.seconds * 1e3:.2f}", rate, memory, *errors])
    return [
        f"{device_name(choice.device)}, {choice.dtype}:"
        f" {config.train.batch_size * config.train.seq_len:,} rows, width {config.model.dim},"
        f" vocabulary {config.model.vocab_size:,}",
        *table(lines),
        *(f"{row.name}: {row.refusal}" for row in rows if row.refusal),
        "TFLOP/s: 6 x rows x width x vocabulary, forward and backward; errors against float64 on"
        f" {CHECKED_ROWS} rows",
    ]


# `foundling bench kernels --only optimizer`: the update alone, of a model's own parameters with
# random gradients.
#
# AdamW as a loop, in multi-tensor calls and fused, and every optimizer that `optim.name` offers,
# made by the trainer's own builder. State is counted in bytes of what the optimizer keeps.

Make = Callable[[Transformer], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class OptimizerTiming:
    """One optimizer."""

    name: str
    refusal: str = ""
    seconds: float = 0.0
    state_bytes: int = 0
    state_per_param: float = 0.0
    ns_per_param: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


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
) -> Iterator[OptimizerTiming]:
    """Measure each; one that cannot be built says why."""
    alone(config, rows=False)
    choice = prepare(config.train)
    there = optimizers(config)
    refuse_unknown((word for word in only if not any(word in name for name in there)), there)

    def rows() -> Iterator[OptimizerTiming]:
        for name, make in there.items():
            if only and not any(word in name for word in only):
                continue
            refusal = ""
            try:
                yield _measured_optimizer(config, choice, name, make, seconds)
            except (UserError, RuntimeError, ImportError) as error:
                refusal = str(error).splitlines()[0][:160]
            if refusal:
                yield OptimizerTiming(name=name, refusal=refusal)
            release_memory()

    return rows()


def _measured_optimizer(
    config: RunConfig, choice: DeviceChoice, name: str, make: Make, seconds: float
) -> OptimizerTiming:
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
    return OptimizerTiming(
        name=name,
        seconds=took,
        state_bytes=held,
        state_per_param=held / count,
        ns_per_param=took / count * 1e9,
    )


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


def describe_optimizer(rows: list[OptimizerTiming], config: RunConfig) -> list[str]:
    """The table as text."""
    choice = choose(config.train.device, config.train.dtype)
    lines = [["optimizer", "ms", "ns a parameter", "state", "bytes a parameter"]]
    for row in rows:
        if not row.refusal:
            state = [size(row.state_bytes), f"{row.state_per_param:.2f}"]
            times = [f"{row.seconds * 1e3:.2f}", f"{row.ns_per_param:.4f}"]
            lines.append([row.name, *times, *state])
    return [
        f"{device_name(choice.device)}: one update of every parameter",
        *table(lines),
        *(f"{row.name}: {row.refusal}" for row in rows if row.refusal),
    ]
