"""A model made ready for inference alone: precision of its weights, joined products, fused blocks.

Nothing can be trained afterwards. q, k and v become one product and gate and up another, so that
the same weights are read in fewer launches; on CUDA the small operations around attention and the
products are compiled into one kernel each.
"""

from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from foundling.config.errors import ConfigError
from foundling.model.attention import Attention, Cache
from foundling.model.layers import Rotation
from foundling.model.mlp import FeedForward
from foundling.model.transformer import Block, Transformer

Weights = Literal["fp32", "bf16", "int8"]


def prepare(model: Transformer, weights: Weights, *, compiled: bool = False) -> Transformer:
    """Change `model` in place: its weights in this precision (int8: those of the blocks' products,
    the rest in bf16), its products joined; `compiled` fuses what lies between them, when the first
    step comes."""
    model.requires_grad_(False).eval()
    model.to(torch.float32 if weights == "fp32" else torch.bfloat16)
    for module in list(model.modules()):
        if isinstance(module, Attention | FeedForward):
            module.join_products()
    if weights == "int8":
        _quantise(model)
    elif next(model.parameters()).device.type == "cpu":
        _lay_out_by_columns(model)
    if compiled:
        from foundling.model.kernels.row_product import use_row_products

        use_row_products(model)
        model.layers = nn.ModuleList(FusedBlock(block) for block in model.layers)  # type: ignore[arg-type]
    return model


def _lay_out_by_columns(model: Transformer) -> None:
    """Weights in the order in which a CPU's libraries read them fastest for a few rows: for
    clm-60m all products took 12.0 ms instead of 15.1 for one row, 26.6 instead of 34.4 for 8."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.t().contiguous().t(), requires_grad=False)


def _quantise(model: Transformer) -> None:
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError:
        raise ConfigError(
            "weights in int8 need torchao; install it: pip install 'foundling[torchao]'."
        ) from None
    # Or torchao changes Inductor's settings for the whole process.
    quantize_(model.layers, Int8WeightOnlyConfig(set_inductor_config=False))


class FusedBlock(nn.Module):
    """A block whose halves before and after attention are compiled, each once for all layers."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        mask: Any,
        cache: Cache | None = None,
        start: Tensor | None = None,
        values: Tensor | None = None,
    ) -> Tensor:
        """One layer further, as `Block.forward`; only with a cache is it fused."""
        if cache is None:
            plain: Tensor = self.block(x, rotation, mask, None, start, values)
            return plain
        before, after = _halves()
        x, q, k, v = before(self.block, x, rotation, start, values)
        out: Tensor = after(self.block, x, cache.attend(self.block.attn.layer, q, k, v))
        return out


MOST_GRAPHS = 64
"""Of one function: a model needs a few, for one row and for many, and a process may have models."""


@lru_cache
def _halves() -> tuple[Any, Any]:
    import torch.compiler.config as config

    config.recompile_limit = max(config.recompile_limit, MOST_GRAPHS)
    return torch.compile(_before, dynamic=True), torch.compile(_after, dynamic=True)


def _before(
    block: Block, x: Tensor, rotation: Rotation | None, start: Tensor | None, values: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = block.mixed(x, start)
    return x, *block.attn.project(block.attn_norm(x), rotation, values)


def _after(block: Block, x: Tensor, attended: Tensor) -> Tensor:
    return block.feed(x + block.attn.o(attended.flatten(2)))
