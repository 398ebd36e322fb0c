"""Whether a run's squared ReLUs are made inside their products: found by launching both.

The plain way costs a product and a pass over its result; a compiled pass moves the same bytes as
torch's `relu` forward and `mul` backward, so those stand for it here, and nothing is compiled.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from foundling.config.errors import ConfigError
from foundling.config.model import ModelConfig
from foundling.config.train import TrainConfig
from foundling.model.mlp import relu2_backward_matmul, relu2_matmul, relu2_mlp
from foundling.runtime.device import has_triton
from foundling.train.autotune.harness import (
    Candidate,
    candidate_seconds,
    max_relative_error,
    pick,
    try_candidate,
)

ALIGNMENT = 8
"""Numbers in bf16 that the device's copies take at once."""
MlpName = Literal["plain", "fused"]
MIN_CAPABILITY = (9, 0)
"""Compute capability whose copies the kernels use: Hopper."""


def choose_mlp(
    model: ModelConfig, train: TrainConfig, tensor: int, device: torch.device, dtype: torch.dtype
) -> tuple[MlpName, str]:
    """The MLP to use over `tensor` ranks, and a line about it where there was a choice."""
    wanted = train.kernels.mlp
    if wanted == "plain":
        return "plain", ""
    line = ""
    if not (refusal := _refusal(model, train, tensor, device, dtype)):
        tried = _try_both(model, train, device)
        working, why = pick(tried)
        if not (refusal := tried[0].refusal):
            name: MlpName = "fused" if "fused" in (wanted, working[0].name) else "plain"
            return name, f"mlp {name} ({'asked for; ' * (wanted == 'fused')}{why})"
        # Where it should work: a fallback is never silent.
        line = f"WARNING: mlp plain, fused cannot be used: {refusal}"
    if wanted == "fused":
        raise ConfigError(
            f"train.kernels.mlp fused cannot be used here: {refusal}; set it to plain."
        )
    return "plain", line


def _refusal(
    model: ModelConfig, train: TrainConfig, tensor: int, device: torch.device, dtype: torch.dtype
) -> str:
    """Why the fused kernels cannot be used, as far as that is known without a launch."""
    if model.activation != "relu2":
        return f"the model's activation is {model.activation} and not relu2"
    if model.bias == "all":
        return "the model's products have biases"
    if model.dim % ALIGNMENT or model.ffn_dim % ALIGNMENT:
        return f"model.dim and model.ffn_dim must be multiples of {ALIGNMENT}"
    is_amd = torch.version.hip is not None  # whose numbers of capability mean something else
    if device.type != "cuda" or is_amd or torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return f"{device} is no NVIDIA GPU with compute capability 9 or newer"
    if dtype != torch.bfloat16 or train.float8 != "none":
        return "it computes in bf16 alone (train.dtype bf16, train.float8 none)"
    if tensor > 1:
        return "parallel.tensor cuts the products over processes"
    return "" if has_triton() else "triton is not installed"


def _try_both(model: ModelConfig, train: TrainConfig, device: torch.device) -> list[Candidate]:
    """Fused, and plain where that works: the forward product with its square and the backward one
    with its slope, of a micro-batch's positions."""
    rows = max(train.batch_size * train.seq_len, 1)

    def seconds(of: Callable[[Tensor, Tensor, Tensor, Tensor], object]) -> float:
        x, up, down = (part.bfloat16() for part in _random_inputs(model, rows, device))
        squares = relu2_matmul(x, up)
        return candidate_seconds(lambda: of(x, up, down, squares), device)

    def fused(x: Tensor, up: Tensor, down: Tensor, squares: Tensor) -> None:
        relu2_matmul(x, up)
        relu2_backward_matmul(x, down, squares)

    def plain(x: Tensor, up: Tensor, down: Tensor, squares: Tensor) -> None:
        torch.relu(x @ up.t())
        torch.mul(x @ down, squares)

    found = [try_candidate("fused", lambda: mlp_error(model, device), lambda: seconds(fused))]
    if not found[0].refusal:
        found.append(try_candidate("plain", lambda: 0.0, lambda: seconds(plain)))
    torch.cuda.empty_cache()
    return found


def _random_inputs(
    model: ModelConfig, rows: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, C], up [F, C] and down [C, F], scaled so that nothing overflows."""
    generator = torch.Generator(device).manual_seed(0)
    width, inner = model.dim, model.ffn_dim
    shapes = ((rows, width), (inner, width), (width, inner))
    scales = (1.0, width**-0.5, inner**-0.5)
    x, up, down = (
        torch.randn(*shape, device=device, generator=generator) * scale
        for shape, scale in zip(shapes, scales, strict=True)
    )
    return x, up, down


def _checked_rows(model: ModelConfig, device: torch.device) -> int:
    """Enough that every processor takes several tiles, and no multiple of one."""
    from foundling.model.kernels.triton_kernels import COLUMNS, ROWS

    processors = torch.cuda.get_device_properties(device).multi_processor_count
    wide = -(-model.ffn_dim // COLUMNS)
    return ROWS * (2 * processors // wide + 2) + ROWS // 3


def mlp_error(model: ModelConfig, device: torch.device) -> float:
    """Largest relative error, in norm, of result and gradients against float64."""
    parts = _random_inputs(model, _checked_rows(model, device), device)
    return max_relative_error(
        relu2_mlp,
        lambda x, up, down: (x @ up.t()).relu().square() @ down.t(),
        [part.bfloat16().requires_grad_() for part in parts],
    )
