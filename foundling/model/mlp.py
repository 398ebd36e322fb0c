"""The feed-forward network: gated or squared ReLU, with the products fused where they can be."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundling.config.model import ModelConfig
from foundling.model.layers import joined_linear


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)); without a gate: down(act(up(x))), where act is ReLU, its
    square, or GELU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        biased, gated = config.bias == "all", config.activation == "swiglu"
        self.activation = config.activation
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=biased) if gated else None
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=biased)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=biased)
        self.gate_up: nn.Linear | None = None
        """Both as one product, once `join_products` has been called."""
        self.is_fused = False
        """Whether the square is made by its product: training's choice, where there is one."""

    def forward(self, x: Tensor) -> Tensor:
        if self.is_fused and torch.is_grad_enabled() and can_fuse_mlp(x, self.up, self.down):
            return relu2_mlp(x, self.up.weight, self.down.weight)
        if self.gate_up is not None:
            gate, up = self.gate_up(x).chunk(2, -1)
            inner = F.silu(gate) * up
        elif self.gate is not None:
            inner = F.silu(self.gate(x)) * self.up(x)
        elif self.activation == "gelu":
            inner = F.gelu(self.up(x), approximate="tanh")
        elif self.activation == "relu2":
            inner = squared_relu(self.up(x))
        else:
            inner = F.relu(self.up(x))
        out: Tensor = self.down(inner)
        return out

    def join_products(self) -> None:
        """Make gate and up by one product from now on: for a model that is not trained further."""
        if self.gate is not None:
            self.gate_up = joined_linear([self.gate, self.up])
            del self.gate, self.up


# Squared ReLU that keeps its result and nothing else; alone, and with the products around it.
#
# Its slope is 2 relu(x), which is twice the root of its result: and the result is kept anyway, for
# the gradient of the next matrix. Left to autograd, the input would be kept too, the widest tensor
# of the block once more (13 GB for depth-20 at 32 rows of 2048). In fp16 a small result is zero
# where its root is not, so there autograd keeps what it wants.
#
# `relu2_mlp` is the whole feed-forward: the first product ends in the square, and the gradient's
# product in the slope, inside one kernel each (model/kernels/triton_kernels.py) where that was
# measured to be faster (foundling/train/autotune/mlp.py).
#
# Shapes: N rows, C width, F width of the feed-forward.


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2."""
    if x.dtype == torch.float16:
        bent = F.relu(x)
        # Not square(): autocast makes powers, and what is kept for them, in fp32.
        return bent * bent
    out: Tensor = _SquaredReLU.apply(x)  # type: ignore[no-untyped-call]
    return out


class _SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        bent = F.relu(x)
        out = bent * bent
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        slope: Tensor = 2 * out.sqrt()
        return grad * slope


def can_fuse_mlp(x: Tensor, up: nn.Linear, down: nn.Linear) -> bool:
    """Whether these products are plain ones in bf16: not exchanged for float8's, not cut over
    processes, without biases."""
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    return bool(
        dtype == torch.bfloat16
        and type(up) is type(down) is nn.Linear
        and up.bias is None
        and down.bias is None
        and all(type(part.weight) in (nn.Parameter, Tensor) for part in (up, down))
    )


def relu2_mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """down(relu(up(x))^2) of x [..., C] in bf16; up [F, C], down [C, F]."""
    narrow = (part.to(torch.bfloat16) for part in (x.flatten(0, -2), up, down))
    out: Tensor = _Relu2Mlp.apply(*narrow)  # type: ignore[no-untyped-call]
    return out.view(x.shape)


class _Relu2Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        squares: Tensor = relu2_matmul(x, up)
        ctx.save_for_backward(x, up, down, squares)
        return squares @ down.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, up, down, squares = ctx.saved_tensors
        inner = relu2_backward_matmul(grad, down, squares)
        return inner @ up, inner.t() @ x, grad.t() @ squares


@torch.library.custom_op("foundling::relu2_matmul", mutates_args=())
def relu2_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """relu(x [N, C] @ weight [F, C]^T)^2."""
    if x.device.type == "cuda":
        from foundling.model.kernels.triton_kernels import squared

        return squared(x.contiguous(), weight.contiguous())
    bent = F.relu(x @ weight.t())
    return bent * bent


@relu2_matmul.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("foundling::relu2_backward_matmul", mutates_args=())
def relu2_backward_matmul(grad: Tensor, weight: Tensor, squares: Tensor) -> Tensor:
    """(grad [N, C] @ weight [C, F]) times the slope, 2 sqrt(squares [N, F])."""
    if grad.device.type == "cuda":
        from foundling.model.kernels.triton_kernels import sloped

        return sloped(grad.contiguous(), weight.contiguous(), squares.contiguous())
    return grad @ weight * (2 * squares.sqrt())


@relu2_backward_matmul.register_fake
def _(grad: Tensor, weight: Tensor, squares: Tensor) -> Tensor:
    return torch.empty_like(squares)
