"""`foundling bench loss`: ways to compute the head's cross-entropy and its gradients, side by side.

plain    logits of all rows, then cross-entropy
fused    ours: in chunks, gradients made in the forward pass
torch    F.linear_cross_entropy, where torch has it
liger    liger-kernel's, where it is installed (CUDA)

Errors are against float64 on a few rows: of the loss and of both gradients.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from foundling.bench.early import refuse_unknown
from foundling.bench.steps import alone, free
from foundling.config.sections import RunConfig
from foundling.plan.words import size, table
from foundling.runtime.device import Choice, choose, prepare
from foundling.train.ceilings import device_name, time_of
from foundling.train.head_loss import (
    CHECKED_ROWS,
    Loss,
    both_passes,
    drawn,
    exact_passes,
    plain_way,
    ways_here,
)
from foundling.train.memory import forget_peak, memory_now


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


def losses(config: RunConfig, choice: Choice) -> dict[str, Loss | str]:
    """Every way by name, or why it is not there."""
    found: dict[str, Loss | str] = {"plain": plain_way(config)}
    for here in ways_here(config, choice):
        found |= {str(name): way for name, way in here.items()}
    return found


def bench_loss(
    config: RunConfig, *, only: tuple[str, ...] = (), seconds: float = 0.5
) -> Iterator[Row]:
    """Measure each way at the config's rows, width and vocabulary."""
    alone(config)
    choice = prepare(config.train)
    ways = losses(config, choice)
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
    given = drawn(config, choice, rows)

    def work() -> list[Tensor]:
        return both_passes(loss, choice, given)

    held = work()  # gradients too are there between two steps
    before = memory_now(choice.device)["memory_allocated"]
    del held
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


def _errors(config: RunConfig, choice: Choice, loss: Loss) -> tuple[float, float]:
    found = both_passes(loss, choice, drawn(config, choice))
    pairs = zip(found, exact_passes(config, choice), strict=True)
    total, *grads = (float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)
    return total, max(grads)


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
