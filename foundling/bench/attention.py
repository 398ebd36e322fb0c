"""`foundling bench attention`: every kernel at a model's shapes, its speed and its error.

A kernel is launched and not looked up: what a build of torch says it has, and what runs at a shape,
differ. Errors are against the formula in float64 on one row and a few heads, of the output and of
the three gradients, relative to the largest value of each.

Shapes: B rows, H query heads, K key/value heads, T time, D head width.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foundling.bench.early import refuse_unknown
from foundling.bench.steps import alone, free
from foundling.config.sections import RunConfig
from foundling.model.kernels import KERNELS, TORCH, Kernel, MaskSpec, dense_mask
from foundling.plan.words import table
from foundling.runtime.device import Choice, choose, prepare
from foundling.train.ceilings import IN_A_ROW_S, device_name, time_of
from foundling.train.launches import Shape, reference

DOCUMENTS = (0.1, 0.15, 0.3)
"""Where a row's documents end, as shares of it: four of uneven length."""
SECONDS = 0.2
"""Of timing for each measurement."""


@dataclass(frozen=True, kw_only=True)
class Row:
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
) -> Iterator[Row]:
    """Every kernel that can be launched, causal, per document and windowed."""
    alone(config, words=False)
    choice = prepare(config.train)
    kernels = _kernels(choice)
    refuse_unknown(only, kernels)
    for mask, spec in _specs(config, choice.device).items():
        for name, kernel in kernels.items():
            if not only or name in only:
                yield _measured(config, choice, mask, spec, name, kernel, seconds)
                free(choice.device)


def best_attention(
    config: RunConfig,
    choice: Choice,
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
        _measured(config, choice, "", spec, name, kernel, seconds, check=False)
        for name, kernel in _kernels(choice).items()
        if name not in slow or choice.device.type != "cuda"
    )
    return max((row.flops_per_s for row in rows if not row.refusal), default=0.0)


def _kernels(choice: Choice) -> dict[str, Kernel]:
    """Those that can be named here; what torch picks by itself is one of the others on CUDA."""
    if choice.device.type == "cuda":
        return {name: kernel for name, kernel in KERNELS.items() if name != TORCH.name}
    return {name: KERNELS[name] for name in ("torch", "math")}


def _specs(config: RunConfig, device: torch.device) -> dict[str, MaskSpec]:
    rows, width = config.train.batch_size, config.train.seq_len
    edges = torch.tensor([int(share * width) for share in DOCUMENTS], device=device)
    numbers = (torch.arange(width, device=device)[:, None] >= edges).sum(1).to(torch.int32)
    window = config.model.window or max(1, width // 4)
    return {
        "causal": MaskSpec(None, 0),
        "documents": MaskSpec(numbers.expand(rows, -1).contiguous(), 0),
        f"window {window}": MaskSpec(None, window),
    }


def _measured(
    config: RunConfig,
    choice: Choice,
    mask: str,
    spec: MaskSpec,
    name: str,
    kernel: Kernel,
    seconds: float,
    *,
    check: bool = True,
) -> Row:
    device = choice.device
    if refusal := kernel.refusal(spec, 0.0):
        return Row(mask=mask, kernel=name, refusal=refusal)
    try:
        shape = Shape.of(config.model, config.train.batch_size, config.train.seq_len)
        q, k, v = shape.draw(device, choice.dtype)
        grad, seen = torch.randn_like(q), kernel.mask(spec, q.shape[2], device)

        def both() -> None:
            q.grad = k.grad = v.grad = None
            kernel.attend(q, k, v, seen, 0.0).backward(grad)  # type: ignore[no-untyped-call]

        @torch.no_grad()
        def forward() -> None:
            kernel.attend(q, k, v, seen, 0.0)

        def time(work: Callable[[], None]) -> float:
            return time_of(work, device, seconds, at_least=IN_A_ROW_S)

        forward_s, both_s = time(forward), time(both)
        # Once more behind it: a clock or a neighbour that changes in between must not eat the rest.
        forward_s = min(forward_s, time(forward))
        pairs = _pairs(spec, config) * config.train.batch_size * config.model.heads
        return Row(
            mask=mask,
            kernel=name,
            forward_s=forward_s,
            backward_s=max(both_s - forward_s, 0.0),
            flops_per_s=14 * pairs * config.model.head_width / both_s,
            error=_error(kernel, spec, q, k, v, grad) if check else 0.0,
        )
    except (RuntimeError, NotImplementedError, ImportError) as error:  # no such kernel, no room
        return Row(mask=mask, kernel=name, refusal=str(error).splitlines()[0][:120])


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


def describe_attention(rows: list[Row], config: RunConfig) -> list[str]:
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
