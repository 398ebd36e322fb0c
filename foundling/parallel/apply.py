"""THE order in which a plain model is made parallel: compile the blocks, then DDP.

Blocks are compiled one by one (seconds, and the same code for each), before DDP wraps the whole,
so that DDP's buckets overlap with the backward pass between blocks. The model itself never learns
that it is replicated.
"""

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from foundling.config.errors import ConfigError
from foundling.config.sections import ParallelConfig
from foundling.model import Transformer
from foundling.runtime.dist import World


class LossModule(nn.Module):
    """The model seen as a loss: DDP only works through `forward`, and ours must be the loss."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, targets: Tensor, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(loss_sum, token_count) of one micro-batch."""
        return self.model.loss(tokens, targets, documents)


def apply_parallel(
    model: Transformer, parallel: ParallelConfig, world: World, *, compile_blocks: bool
) -> nn.Module:
    """Wrap `model` for this world; the result maps a micro-batch to (loss_sum, token_count)."""
    replicas = parallel.replicate or world.size
    if replicas != world.size:
        raise ConfigError(
            f"parallel.replicate is {replicas} and the job has {world.size} processes;"
            " leave it at 0 to use them all."
        )
    if compile_blocks:
        for block in model.layers:
            block.compile()
    module: nn.Module = LossModule(model)
    if world.size > 1:
        device = next(model.parameters()).device
        module = DistributedDataParallel(
            module,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
    return module
