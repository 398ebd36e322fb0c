"""`foundling bench loss`: ways to compute the head's cross-entropy and its gradients, side by side.

plain    logits of all rows, then cross-entropy
fused    ours: in chunks, gradients made in the forward pass
torch    F.linear_cross_entropy, where torch has it
liger    liger-kernel's, where it is installed (CUDA)

Errors are against float64 on a few rows: of the loss and of both gradients.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foundling.bench.early import refuse_unknown
from foundling.bench.steps import free
from foundling.config.sections import RunConfig
from foundling.model import cross_entropy_sum
from foundling.parallel.losses import torch_loss
from foundling.plan.words import size, table
from foundling.runtime.device import Choice, choose, set_threads
from foundling.train.ceilings import device_name, time_of
from foundling.train.metrics import forget_peak, memory_now

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Hidden [N, C], head [V, C], targets [N] to the summed loss."""
CHECKED_ROWS = 32


@dataclass(frozen=True, kw_only=True)
class Row:
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


def losses(softcap: float = 0.0, z_weight: float = 0.0) -> dict[str, Loss | str]:
    """Every way by name, or why it is not there."""
    bends = softcap, z_weight
    found: dict[str, Loss | str] = {
        "plain": lambda hidden, head, targets: _plain(hidden, head, targets, *bends),
        "fused": lambda hidden, head, targets: cross_entropy_sum(hidden, head, targets, *bends)[0],
    }
    found["torch"] = "this torch has no F.linear_cross_entropy"
    if hasattr(F, "linear_cross_entropy"):
        missing = "softcap" if softcap else "z-loss" if z_weight else ""
        found["torch"] = f"F.linear_cross_entropy has no {missing}" if missing else _of_torch
    found["liger"] = "liger-kernel is not installed"
    if importlib.util.find_spec("liger_kernel") is not None:
        found["liger"] = _of_liger(*bends) if torch.cuda.is_available() else "needs CUDA"
    return found


def _plain(
    hidden: Tensor, head: Tensor, targets: Tensor, softcap: float, z_weight: float
) -> Tensor:
    logits = F.linear(hidden, head)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, targets, reduction="sum")
    return loss + z_weight * logits.logsumexp(-1).square().sum() if z_weight else loss


def _of_torch(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, head = hidden.to(dtype), head.to(dtype)
    return torch_loss(hidden, head, targets)


def _of_liger(softcap: float, z_weight: float) -> Loss:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss: Any = LigerFusedLinearCrossEntropyLoss(
        reduction="sum", softcap=softcap or None, lse_square_scale=z_weight
    )
    return lambda hidden, head, targets: loss(head, hidden, targets)


def bench_loss(
    config: RunConfig, *, only: tuple[str, ...] = (), seconds: float = 0.5
) -> Iterator[Row]:
    """Measure each way at the config's rows, width and vocabulary."""
    choice = choose(config.train.device, config.train.dtype)
    set_threads(config.train.threads)
    ways = losses(config.model.logit_softcap, config.train.z_loss)
    refuse_unknown(only, ways)
    for name, loss in ways.items():
        if only and name not in only:
            continue
        if isinstance(loss, str):
            yield Row(name=name, refusal=loss)
            continue
        refusal = ""
        try:
            yield _measured(config, choice, name, loss, seconds)
        except (RuntimeError, ImportError) as error:  # no room, or no kernel for this shape
            refusal = str(error).splitlines()[0][:120]
        if refusal:
            yield Row(name=name, refusal=refusal)
        free(choice.device)


def _measured(config: RunConfig, choice: Choice, name: str, loss: Loss, seconds: float) -> Row:
    rows = config.train.batch_size * config.train.seq_len
    dim, vocab = config.model.dim, config.model.vocab_size
    hidden, head, targets = _drawn(config, choice, rows)

    def work() -> Tensor:
        hidden.grad = head.grad = None
        with torch.autocast(
            choice.device.type, choice.dtype, enabled=choice.dtype != torch.float32
        ):
            total = loss(hidden, head, targets)
        total.backward()  # type: ignore[no-untyped-call]
        return total.detach()

    work()
    before = memory_now(choice.device)["memory_allocated"]
    forget_peak(choice.device)
    work()
    peak = memory_now(choice.device)["memory_peak"] - before
    took = time_of(work, choice.device, seconds)
    loss_error, grad_error = _errors(config, choice, loss)
    return Row(
        name=name,
        seconds=took,
        flops_per_s=6 * rows * dim * vocab / took,
        memory=peak if choice.device.type == "cuda" else 0,
        loss_error=loss_error,
        grad_error=grad_error,
    )


def _drawn(config: RunConfig, choice: Choice, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(choice.device).manual_seed(config.train.seed)
    dim, vocab, device = config.model.dim, config.model.vocab_size, choice.device
    hidden = torch.randn(rows, dim, generator=generator, device=device)
    if choice.dtype != torch.float32:
        hidden = hidden.to(choice.dtype)
    head = torch.randn(vocab, dim, generator=generator, device=device).mul_(dim**-0.5)
    targets = torch.randint(vocab, (rows,), generator=generator, device=device)
    return hidden.requires_grad_(), head.requires_grad_(), targets


def _errors(config: RunConfig, choice: Choice, loss: Loss) -> tuple[float, float]:
    hidden, head, targets = _drawn(config, choice, CHECKED_ROWS)
    mixed = choice.dtype != torch.float32
    with torch.autocast(choice.device.type, choice.dtype, enabled=mixed):
        found = loss(hidden, head, targets)
    found.backward()  # type: ignore[no-untyped-call]
    wide, wide_head = (tensor.detach().double().requires_grad_() for tensor in (hidden, head))
    wanted = _plain(wide, wide_head, targets, config.model.logit_softcap, config.train.z_loss)
    wanted.backward()  # type: ignore[no-untyped-call]
    pairs = ((hidden.grad, wide.grad), (head.grad, wide_head.grad))
    return float((found.detach().double() - wanted.detach()).abs() / wanted.detach()), max(
        float((a.double() - b).abs().max() / b.abs().max())
        for a, b in pairs
        if a is not None and b is not None
    )


def describe_loss(rows: list[Row], config: RunConfig) -> list[str]:
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
