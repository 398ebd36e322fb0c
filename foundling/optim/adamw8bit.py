"""AdamW with its moments in 8 bits (Dettmers et al. 2022): 2.1 bytes a parameter instead of 8."""

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from foundling.config.errors import ConfigError
from foundling.config.optim import MIN_BLOCK_SIZE, MIN_MOMENT, moment_block_size
from foundling.optim.sharded_matrices import local
from foundling.runtime.console import first_line, warn
from foundling.runtime.device import has_triton

# The arithmetic is AdamW's in fp32; only what is kept from step to step is rounded. Kept are the
# first moment and the ROOT of the second: the update divides by the root, 8 bits span seven powers
# of ten of it instead of three and a half, and its rounding errors are halved where it is small.
#
# Everything kept is a plain tensor with its parameter's layout, so it is saved, resharded and
# loaded like any weight. Rejected: torchao's AdamW8bit, whose blocks depend on the layout, which
# keeps fp32 where a rank's part does not divide by its block, and whose state is of a tensor class
# that no checkpoint of ours may hold.

KEPT = {"exp_avg": True, "exp_avg_root": False}
"""What is kept, and whether it has a sign."""
Three = tuple[float, float, float]


class AdamW8bit(torch.optim.Optimizer):
    """For matrices whose rows divide into blocks (`check_rows`)."""

    def __init__(
        self, params: Iterable[dict[str, Any]], *, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.0, "betas": betas, "eps": eps})

    def init_state(self, param: Tensor) -> None:
        """Begin with zeros: codes as large as the parameter, and a scale for each block."""
        state = self.state[param]
        state["step"] = torch.zeros((), dtype=torch.float32)
        for name in KEPT:
            state[f"{name}_codes"] = torch.zeros_like(param, dtype=torch.uint8)
            state[f"{name}_scale"] = _scales(param)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            rates: dict[float, Three] = {}
            for param in group["params"]:
                if param.grad is None:
                    continue
                if not self.state[param]:
                    self.init_state(param)
                state = self.state[param]
                state["step"] += 1
                step = float(state["step"])
                if step not in rates:
                    rates[step] = _rates(group, step)
                self._update(param, param.grad, state, rates[step], (beta1, beta2, group["eps"]))

    def _update(
        self,
        param: Tensor,
        grad: Tensor,
        state: dict[str, Tensor],
        rates: Three,
        fixed: Three,
    ) -> None:
        weight, grad = local(param).detach(), local(grad)
        kept = [local(state[f"{name}_{part}"]) for name in KEPT for part in ("codes", "scale")]
        if not weight.numel():
            return
        maps = _maps(weight.device)
        if weight.is_cuda and _has_kernel(weight, grad, *kept):
            from foundling.optim.adamw8bit_kernel import step_

            step_(weight, grad, kept, maps, rates, fixed)
        else:
            adamw_8bit(weight, grad, kept, maps, rates, fixed)


def _maps(device: torch.device) -> list[Tensor]:
    """Values and borders of the codes, in KEPT's order."""
    return [make(sign, device) for sign in KEPT.values() for make in (table, bounds)]


def _has_kernel(*tensors: Tensor) -> bool:
    """Whether the kernel can be had, to which blocks must follow each other in memory."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        _warn_without_kernel("a part is not contiguous")
        return False
    return _kernel_works(tensors[0].device)


@lru_cache
def _kernel_works(device: torch.device) -> bool:
    """Whether the kernel can be compiled and launched: tried on a block of zeros, because a launch
    that fails on a parameter may have changed it."""
    if not has_triton():
        _warn_without_kernel("triton is not installed")
        return False
    from foundling.optim.adamw8bit_kernel import step_

    wide, scale = torch.zeros(1, MIN_BLOCK_SIZE, device=device), torch.zeros(1, 1, device=device)
    kept = [part.clone() for _ in KEPT for part in (wide.to(torch.uint8), scale)]
    try:
        step_(wide, wide.clone(), kept, _maps(device), (1.0, 0.0, 1.0), (0.9, 0.9, 1e-8))
    except Exception as error:  # no C compiler, a GPU that triton does not know
        _warn_without_kernel(first_line(error))
        return False
    return True


@lru_cache
def _warn_without_kernel(why: str) -> None:
    warn(f"8-bit AdamW runs without its kernel ({why}), slower and with more memory.")


def check_rows(name: str, param: Tensor) -> None:
    """Refuse a parameter that cannot be kept in 8 bits under this layout."""
    columns = param.shape[-1]
    block = moment_block_size(columns) if param.ndim == 2 else 0
    if not block:
        raise ConfigError(
            f"optim.name adamw8bit needs rows that divide by {MIN_BLOCK_SIZE}, and {name} is"
            f" {' x '.join(map(str, param.shape))}; change the model's width, or use optim.name"
            " adamw."
        )
    here = local(param).shape[-1]
    if here % block:
        raise ConfigError(
            f"optim.name adamw8bit keeps the rows of {name} in blocks of {block} of {columns}, and"
            f" the layout cuts them into {here}; use another parallel.tensor, or optim.name adamw."
        )


def _rates(group: dict[str, Any], step: float) -> Three:
    """1 - lr decay, lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t)."""
    beta1, beta2 = group["betas"]
    shrink = 1 - group["lr"] * group["weight_decay"]
    return shrink, group["lr"] / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)


def adamw_8bit(
    weight: Tensor,
    grad: Tensor,
    kept: list[Tensor],
    maps: list[Tensor],
    rates: Three,
    fixed: Three,
) -> None:
    """One step of one parameter, in place; `kept` and `maps` are in KEPT's order."""
    avg_codes, avg_scale, root_codes, root_scale = kept
    avg_table, avg_bounds, root_table, root_bounds = maps
    shrink, pace, correction = rates
    beta1, beta2, eps = fixed
    grad = grad.float()
    avg = unpack(avg_codes, avg_scale, avg_table) * beta1 + grad * (1 - beta1)
    root = unpack(root_codes, root_scale, root_table)
    root = (root * root * beta2 + grad * grad * (1 - beta2)).sqrt()
    new = [weight * shrink - pace * avg / (root * correction + eps)]
    new += pack(avg, avg_scale.shape[1], avg_bounds)
    new += pack(root, root_scale.shape[1], root_bounds)
    for there, here in zip((weight, *kept), new, strict=True):
        there.copy_(here)


def _scales(param: Tensor) -> Tensor:
    """A zero for each block, laid out as the parameter is."""
    rows, columns = param.shape
    block = moment_block_size(columns)
    here = local(param)
    scale = torch.zeros(here.shape[0], here.shape[1] // block, device=here.device)
    if not isinstance(param, DTensor):
        return scale
    shape = torch.Size((rows, columns // block))
    return DTensor.from_local(
        scale,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=shape,
        stride=(shape[1], 1),
    )


# Numbers in 8 bits: dynamic tree quantisation (Dettmers 2016) over blocks within a row.
#
# A block's largest magnitude becomes its scale, and each number one of 256 values between -1 and 1
# (or 0 and 1) that lie the denser the nearer to zero, over seven powers of ten.
#
# A block never leaves its row, and all of a row's blocks are equally long: so the codes [R, C] and
# the scales [R, C / block] of a matrix can be cut along rows, and along whole blocks of columns, as
# the matrix is: what a rank holds does not depend on the layout, nor does a checkpoint. Rejected:
# blocks of the flattened tensor (torchao, bitsandbytes), which begin anew in every rank's part.

DECADES = 7
"""Of a scale that is divided by."""


@lru_cache(maxsize=16)
def table(signed: bool, device: torch.device) -> Tensor:
    """The 256 values, rising. Of each power of ten there are twice as many as of the one below;
    each stands for the middle of its piece of (0.1, 1]."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        pieces = 2 ** (decade if signed else decade + 1)
        width = 0.9 / pieces
        middles = [0.1 + width * (piece + 0.5) for piece in range(pieces)]
        found = [10.0 ** (decade - DECADES + 1) * middle for middle in middles]
        values += found + ([-value for value in found] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@lru_cache(maxsize=16)
def bounds(signed: bool, device: torch.device) -> Tensor:
    """The 255 borders between one value and the next.

    Without a sign, only zero becomes zero: the root of a second moment that was rounded down to
    zero would let the update of its neighbours explode.
    """
    values = table(signed, device)
    middles = (values[1:] + values[:-1]) / 2
    if not signed:
        middles[0] = 0.0
    return middles


def unpack(codes: Tensor, scale: Tensor, values: Tensor) -> Tensor:
    """The numbers that codes [R, C] and scales [R, C / block] stand for."""
    rows, columns = codes.shape
    found = values[codes.int()].view(rows, scale.shape[1], -1) * scale.unsqueeze(-1)
    return found.view(rows, columns)


def pack(numbers: Tensor, blocks: int, borders: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of numbers [R, C], in so many blocks a row."""
    rows, columns = numbers.shape
    cut = numbers.view(rows, blocks, columns // blocks)
    scale = cut.abs().amax(-1)
    unit = cut / scale.clamp(min=MIN_MOMENT).unsqueeze(-1)
    codes = torch.bucketize(unit, borders, out_int32=True)
    return codes.to(torch.uint8).view(rows, columns), scale
