"""torch.compile, applied to the blocks one by one or to all of them together."""

from foundling.config.sections import Compile
from foundling.model import Transformer

MOST_GRAPHS = 64
"""Lengths of rows times kinds of blocks that may be compiled."""


def compile_model(model: Transformer, mode: Compile | bool) -> None:
    """One graph for each shape of a micro-batch. Left to itself, dynamo answers the second shape
    with graphs for any shape, which are slower, and after eight it quietly runs eagerly: a run
    whose rows grow, or whose batches come in buckets, has several shapes and keeps to them."""
    import torch._dynamo  # seconds, which a run without compilation does not pay

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
    model.is_compiled = True
    if mode == "model":
        # The loss stays outside: compiled into the graph, its gradients once became zeros.
        model.run_blocks = torch.compile(model.run_blocks, dynamic=False)  # type: ignore[method-assign]
        return
    for block in model.layers:
        block.compile(dynamic=False, mode="reduce-overhead" if mode == "graphs" else None)
