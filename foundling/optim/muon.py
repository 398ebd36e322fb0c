"""Muon (Jordan et al. 2024): momentum orthogonalised by Newton-Schulz, compiled on CUDA."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Generic, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from foundling.optim.sharded_matrices import MatrixOwners, local
from foundling.runtime.console import first_line, warn

# Orthogonalisation: the nearest matrix to a given one whose singular values are all 1.
#
# Five steps of an odd polynomial of degree five, x -> a x + (b G + c G^2) x with G = x x^T, whose
# coefficients are those of Polar Express (Amsel et al. 2025, five steps, safety 2%): every singular
# value from 1/1000 of the Frobenius norm up comes out between 0.859 and 1.141, where Newton-Schulz
# with one polynomial for all steps (Jordan et al. 2024) leaves 0.47 to 1.20.
#
# K matrices [K, rows, columns] go through together: three batched products a step.

COEFFICIENTS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
SAFETY = 1.02
"""Room for rounding: a singular value above 1 would run away."""
LEAST = 1e-20
"""Below this a matrix is nothing; the gradients of a first step are zero where outputs start at
zero."""


def work_dtype(device: torch.device) -> torch.dtype:
    """bf16 where matrix products are made for it; on a CPU it may be slow, or no instruction at
    all."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def orthogonalise(stack: Tensor) -> Tensor:
    """Each matrix of [K, rows, columns] with its singular values brought to about 1."""
    is_tall = stack.shape[-2] > stack.shape[-1]
    x = stack.mT.contiguous() if is_tall else stack
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=_wide(x.dtype))
    x = (x / (norm * SAFETY).clamp(min=LEAST)).to(stack.dtype)
    for a, b, c in COEFFICIENTS:
        gram = torch.bmm(x, x.mT)
        mixed = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, mixed, x, beta=a)
    return x.mT.contiguous() if is_tall else x


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# A function that is compiled on CUDA and runs as it is elsewhere.

P = ParamSpec("P")
R = TypeVar("R")
MOST_GRAPHS = 64
"""Shapes that may be compiled; a model has a handful."""


class CompiledOnCuda(Generic[P, R]):
    """Compiled at the first call with a CUDA tensor, one graph a shape.

    Where the compiler fails (no Triton, no C compiler), the function itself does the work from then
    on, with one warning.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        self._plain = function
        self._fast: Callable[P, R] | None = None
        self._failed = False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._failed or not _on_cuda(args):
            return self._plain(*args, **kwargs)
        try:
            return self._compiled()(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # Before anything was written: the compiler runs ahead of the first kernel.
            if not _is_compilers(error):
                raise
            self._failed = True
            warn(
                f"{self._plain.__name__} of the optimizer could not be compiled"
                f" ({first_line(error)}); it runs uncompiled, slower and"
                " with more memory."
            )
            return self._plain(*args, **kwargs)

    def _compiled(self) -> Callable[P, R]:
        if self._fast is None:
            settings = torch.compiler.config
            settings.recompile_limit = max(settings.recompile_limit, MOST_GRAPHS)
            self._fast = torch.compile(self._plain, dynamic=False, fullgraph=True)
        return self._fast


def _on_cuda(args: tuple[Any, ...]) -> bool:
    return any(isinstance(one, Tensor) and one.is_cuda for one in args)


def _is_compilers(error: Exception) -> bool:
    """Whether an error is of torch.compile itself, and not of what it compiled."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "triton"))


# Muon (Jordan et al. 2024): momentum whose singular values are all made equal.
#
# m <- mu m + (1 - mu) g          n = mu m + (1 - mu) g       (Nesterov)
# w <- w - lr * decay * w - lr * scale * polar(n)
#
# `scale` turns the polar factor, whose entries have a root mean square of 1 / sqrt(longer side),
# into an update of a known size: `rms` 0.2 sqrt(longer side), the size of a typical AdamW update
# (Liu et al. 2025), `spectral` sqrt(max(1, rows / columns)). Cautious decay (Liang et al. 2024)
# leaves weights alone that the update pushes away from zero.
#
# Matrices of one shape are orthogonalised together; over several ranks they are dealt out
# (sharded_matrices.py). Rejected: torch.optim.Muon, which goes matrix by matrix in bf16 and under
# FSDP2 agrees with one device only to bf16's noise.

MOST = 1 << 27
"""Numbers that a rank orthogonalises at a time: about 1 GB on the way in bf16."""
MOST_MOVED = 1 << 25
"""Numbers whose update is added at a time: two more copies in fp32, 256 MB."""
_orthogonalise = CompiledOnCuda(orthogonalise)


class Muon(torch.optim.Optimizer):
    """For matrices only; `ranks` are those of the whole job, None alone."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        momentum: float,
        scale: str,
        cautious: bool,
        ranks: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.0})
        self._momentum, self._scale, self._cautious = momentum, scale, cautious
        self._ranks = ranks
        self._owners: dict[tuple[int, ...], MatrixOwners] = {}

    def init_state(self, param: Tensor) -> None:
        """Begin with no momentum, laid out as the parameter is."""
        self.state[param]["momentum"] = torch.zeros_like(param, memory_format=torch.preserve_format)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient; collective over `ranks`."""
        assert closure is None
        for group in self.param_groups:
            shapes: dict[tuple[int, ...], list[Tensor]] = {}
            for param in group["params"]:
                shapes.setdefault(tuple(param.shape), []).append(param)
            first = 0
            for shape, params in shapes.items():
                self._update(shape, params, first, group)
                first += len(params)

    def _update(
        self, shape: tuple[int, ...], params: list[Tensor], first: int, group: dict[str, Any]
    ) -> None:
        owners = self._owners_of(params, first) if self._ranks is not None else None
        each = max(1, MOST // math.prod(shape)) * (owners.ranks if owners else 1)
        moved = [number for number, param in enumerate(params) if param.grad is not None]
        for start in range(0, len(moved), each):
            numbers = moved[start : start + each]
            some = [params[number] for number in numbers]
            directions = self._directions(some)
            if owners is None:
                updates = list(_orthogonalise(torch.stack(directions)))
            else:
                stack = owners.gather_whole(numbers, directions)
                updates = owners.scatter_parts(
                    numbers, _orthogonalise(stack) if len(stack) else stack
                )
            rate = group["lr"] * update_scale(self._scale, shape)
            few = max(1, MOST_MOVED // math.prod(shape))
            for first_moved in range(0, len(some), few):
                part = slice(first_moved, first_moved + few)
                self._move(some[part], updates[part], rate, group["lr"] * group["weight_decay"])

    def _directions(self, params: list[Tensor]) -> list[Tensor]:
        """Nesterov's momentum of each, this rank's part of it, in the width and the place where it
        will be orthogonalised."""
        for param in params:
            if not self.state[param]:
                self.init_state(param)
        # torch has no public name for operations on many tensors at once: `_foreach_*`.
        gradients = [local(param.grad) for param in params if param.grad is not None]
        momenta = [local(self.state[param]["momentum"]) for param in params]
        torch._foreach_lerp_(momenta, gradients, 1 - self._momentum)
        ahead = torch._foreach_lerp(gradients, momenta, self._momentum)
        device = _device(params[0])
        dtype = work_dtype(device) if params[0].dtype == torch.float32 else params[0].dtype
        directions = [torch.empty_like(one, dtype=dtype, device=device) for one in ahead]
        torch._foreach_copy_(directions, ahead)
        return directions

    def _move(self, params: list[Tensor], updates: list[Tensor], rate: float, decay: float) -> None:
        """Add the updates, many matrices at once: five launches a matrix keep Python busy, and the
        device waits for it (docs/log.md)."""
        weights = [local(param) for param in params]
        wide = [torch.empty_like(weight) for weight in weights]
        torch._foreach_copy_(wide, updates)
        if decay and self._cautious:
            decayed = torch._foreach_mul(wide, weights)
            torch._foreach_sign_(decayed)  # -1, 0 or 1, and then 0 or 1 (0, where all are zero)
            torch._foreach_clamp_max_(decayed, 0.0)
            torch._foreach_add_(decayed, 1.0)
            torch._foreach_addcmul_(weights, decayed, weights, value=-decay)
        elif decay:
            torch._foreach_mul_(weights, 1 - decay)
        torch._foreach_add_(weights, wide, alpha=-rate)

    def _owners_of(self, params: list[Tensor], first: int) -> MatrixOwners:
        shape = tuple(params[0].shape)
        if shape not in self._owners:
            assert self._ranks is not None
            self._owners[shape] = MatrixOwners(params, first, self._ranks)
        return self._owners[shape]


def update_scale(kind: str, shape: tuple[int, ...]) -> float:
    """What a polar factor of this shape is multiplied with, besides the learning rate."""
    rows, columns = shape
    if kind == "rms":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def _device(param: Tensor) -> torch.device:
    """Where the work is done: weights that are offloaded to the host travel to the device."""
    if isinstance(param, DTensor) and param.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return param.device
