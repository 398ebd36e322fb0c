"""One attention kernel, launched as a run would: whether it is right, and how fast it is."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foundling.config.sections import ModelConfig
from foundling.model.kernels import Kernel, MaskSpec, dense_mask
from foundling.runtime.log import first_line
from foundling.train.ceilings import synchronise
from foundling.train.exactness import TOLERANCE, worst_gap

ROUNDS = 3
UNSTEADY = "its gradients differ from one launch to the next"
"""Why a deterministic run leaves a kernel out."""
NOT_REPEATED = "torch has no way to repeat it bit by bit (train.deterministic)"
"""Likewise, where torch knows without a launch: of cuDNN's attention it does."""
DECLINED = ("No available kernel", "does not have a deterministic implementation")
"""How torch says so."""
IN_A_ROW = 4
"""Passes of a round."""
REPEATS = 5
"""Launches that must agree where a run must repeat itself."""
MOST_EXACT = 2048
"""Positions of a row that is computed in float64."""


@dataclass(frozen=True)
class Tried:
    """One kernel at the run's shapes."""

    name: str
    seconds: float
    """Forward and backward; 0 where it could not be launched."""
    refusal: str = ""


@dataclass(frozen=True)
class Shape:
    """Attention as a run asks for it."""

    rows: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    dropout: float

    @classmethod
    def of(cls, model: ModelConfig, rows: int, width: int) -> "Shape":
        """A model's, for a micro-batch."""
        return cls(rows, width, model.heads, model.num_kv_heads, model.head_width, model.dropout)

    def draw(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """q, k and v that want gradients, in memory as a projection leaves them."""
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


def refusal_at(
    kernel: Kernel,
    at: Sequence[tuple[Shape, MaskSpec]],
    device: torch.device,
    dtype: torch.dtype,
) -> str:
    """Why a kernel cannot be used at some of these, each of which is launched; empty if it can."""
    for shape, spec in at:
        if spec.documents is None and spec.window >= shape.width:
            continue  # no mask at this length, and another kernel's work
        try:
            refusal = kernel.refusal(spec, shape.dropout) or ""
            if not refusal:
                _seconds(kernel, shape, spec, device, dtype, layers=1, rounds=0)
        except Exception as error:  # whatever a kernel that does not fit throws
            refusal = first_line(error)
        if refusal:
            window = f" in a window of {spec.window}" if spec.window else ""
            return f"at {shape.rows} rows of {shape.width}{window}: {refusal}"
    return ""


def try_kernel(
    kernel: Kernel,
    shape: Shape,
    spec: MaskSpec,
    device: torch.device,
    dtype: torch.dtype,
    *,
    layers: int = 1,
) -> Tried:
    """Check a kernel and time it."""
    if refusal := check_kernel(kernel, shape, spec, device, dtype):
        return Tried(kernel.name, 0.0, refusal)
    return time_kernel(kernel, shape, spec, device, dtype, layers=layers)


def check_kernel(
    kernel: Kernel, shape: Shape, spec: MaskSpec, device: torch.device, dtype: torch.dtype
) -> str:
    """Launch a kernel forward and backward and compare a row with float64; why it cannot be used,
    or nothing."""
    if known := kernel.refusal(spec, shape.dropout):
        return known
    try:
        error = worst_error(kernel, shape, spec, device, dtype)
        if not error <= TOLERANCE:
            return f"it is wrong by {error:.1e} of the norm"
        if torch.are_deterministic_algorithms_enabled() and not repeats(
            kernel, shape, spec, device, dtype
        ):
            return UNSTEADY
    except Exception as error:  # whatever a kernel that does not fit throws
        is_declined = any(words in str(error) for words in DECLINED)
        must_repeat = torch.are_deterministic_algorithms_enabled()
        return NOT_REPEATED if must_repeat and is_declined else first_line(error)
    return ""


def time_kernel(
    kernel: Kernel,
    shape: Shape,
    spec: MaskSpec,
    device: torch.device,
    dtype: torch.dtype,
    *,
    layers: int = 1,
) -> Tried:
    """Time a kernel forward and backward; a mask is made once for all `layers`."""
    try:
        seconds = _seconds(kernel, shape, spec, device, dtype, layers=layers, rounds=ROUNDS)
        return Tried(kernel.name, seconds)
    except Exception as error:  # whatever a kernel that does not fit throws
        return Tried(kernel.name, 0.0, first_line(error))


def worst_error(
    kernel: Kernel, shape: Shape, spec: MaskSpec, device: torch.device, dtype: torch.dtype
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
    q, k, v = (x.detach().contiguous().requires_grad_() for x in one.draw(device, dtype))
    out = kernel.attend(q, k, v, kernel.mask(spec, one.width, device), 0.0)
    grad = torch.randn_like(out)
    found = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = reference(spec, *wide)
    wanted = [exact, *torch.autograd.grad(exact, wide, grad.double())]
    return worst_gap(found, wanted)


def repeats(
    kernel: Kernel, shape: Shape, spec: MaskSpec, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether result and gradients are the same bits in a few launches, without dropout."""
    q, k, v = shape.draw(device, dtype)
    mask = kernel.mask(spec, shape.width, device)
    first: list[Tensor] = []
    for _ in range(REPEATS):
        out = kernel.attend(q, k, v, mask, 0.0)
        found = [out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]
        if first and not all(torch.equal(a, b) for a, b in zip(first, found, strict=True)):
            return False
        first = first or found
    return True


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


def _seconds(
    kernel: Kernel,
    shape: Shape,
    spec: MaskSpec,
    device: torch.device,
    dtype: torch.dtype,
    *,
    layers: int,
    rounds: int,
) -> float:
    """Of one forward and backward pass and a layer's share of the mask: the fastest of a few; after
    one launch alone, 0. Several passes are launched in a row, as a compiled step launches them: a
    kernel that Python takes long to launch is not slower for it there."""
    q, k, v = shape.draw(device, dtype)
    grad: Tensor | None = None
    times = []
    for passes in (1, *[IN_A_ROW] * rounds):  # the first one compiles or loads
        synchronise(device)
        began = time.perf_counter()
        mask = kernel.mask(spec, shape.width, device)
        synchronise(device)
        masked = time.perf_counter()
        for _ in range(passes):
            out = kernel.attend(q, k, v, mask, shape.dropout)
            grad = torch.randn_like(out) if grad is None else grad
            torch.autograd.grad(out, (q, k, v), grad)
        synchronise(device)
        times.append((time.perf_counter() - masked) / passes + (masked - began) / layers)
    return min(times[1:], default=0.0)
