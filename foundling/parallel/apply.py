"""THE order in which a plain model is made parallel: recompute, compile the blocks, then DDP.

Recompute comes first, so that the compiler sees it and places the second run where it costs least.
Blocks are compiled one by one (seconds, and the same code for each), before DDP wraps the whole,
so that DDP's buckets overlap with the backward pass between blocks. The model itself never learns
that it is replicated.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from foundling.config.errors import ConfigError
from foundling.config.sections import ParallelConfig
from foundling.model import IGNORE, Transformer
from foundling.parallel.recompute import apply_recompute
from foundling.runtime.dist import World

LossKind = Literal["fused", "plain"]
MOST_GRAPHS = 64
"""Lengths of rows times kinds of blocks that may be compiled."""


class LossModule(nn.Module):
    """The model seen as a loss: DDP only works through `forward`, and ours must be the loss."""

    def __init__(self, model: Transformer, loss: LossKind = "fused") -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(
        self, tokens: Tensor, targets: Tensor, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(loss_sum, token_count) of one micro-batch."""
        if self.loss == "fused":
            return self.model.loss(tokens, targets, documents)
        return plain_loss(self.model(tokens, documents), targets)


def _compile(blocks: nn.ModuleList) -> None:
    """One graph for each shape of a micro-batch. Left to itself, dynamo answers the second shape
    with graphs for any shape, which are slower, and after eight it quietly runs eagerly: a run
    whose rows grow, or whose batches come in buckets, has several shapes and keeps to them."""
    import torch._dynamo  # seconds, which a run without compilation does not pay

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
    for block in blocks:
        block.compile(dynamic=False)


def plain_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of whole logits [B, T, V], summed in fp32, and the number of counted targets.

    What everyone writes first, kept as the yardstick of the fused loss in memory and in time.
    """
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(wide, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    return total, (targets != IGNORE).sum()


def apply_parallel(
    model: Transformer,
    parallel: ParallelConfig,
    world: World,
    *,
    compile_blocks: bool,
    loss: LossKind = "fused",
) -> nn.Module:
    """Wrap `model` for this world; the result maps a micro-batch to (loss_sum, token_count)."""
    replicas = parallel.replicate or world.size
    if replicas != world.size:
        raise ConfigError(
            f"parallel.replicate is {replicas} and the job has {world.size} processes;"
            " leave it at 0 to use them all."
        )
    apply_recompute(model.layers, parallel.recompute)
    if compile_blocks:
        _compile(model.layers)
    module: nn.Module = LossModule(model, loss)
    if world.size > 1:
        device = next(model.parameters()).device
        module = DistributedDataParallel(
            module,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
    return module
