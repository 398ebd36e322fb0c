"""torch.compile, applied to the blocks one by one or to all of them together.

What was compiled is kept across runs, in torch's own cache: below $FOUNDLING_HOME or
~/.cache/foundling, unless TORCHINDUCTOR_CACHE_DIR says otherwise (torch's default is the folder for
temporary files, which a restart empties). The attention kernels are part of the key: torch's key
knows the operator and not the backend it is held to, so a graph taken from the cache would go on
with the kernel of the run that compiled it.
"""

import os
from functools import lru_cache

import torch

from foundling.config.model import ModelConfig
from foundling.config.train import TrainConfig
from foundling.model.kernels.attention_backends import MOST_GRAPHS
from foundling.model.transformer import Transformer
from foundling.runtime.console import warn
from foundling.runtime.files import cache_folder

CACHE = "TORCHINDUCTOR_CACHE_DIR"
PROGRAMS, FEWEST_ROWS, MOST_ROWS = 16, 16, 128
"""Of a norm's backward pass: programs a processor, and rows of one."""


def compile_model(model: Transformer, train: TrainConfig) -> None:
    """One graph for each shape of a micro-batch. Left to itself, dynamo answers the second shape
    with graphs for any shape, which are slower, and after eight it quietly runs eagerly: a run
    whose rows grow, or whose batches come in buckets, has several shapes and keeps to them."""
    settings = torch.compiler.config
    settings.recompile_limit = max(settings.recompile_limit, MOST_GRAPHS)
    key_cache_by_kernels(train)
    if train.deterministic:
        disable_kernel_timing()
    # Weights of a model that will be sharded are nowhere yet: "meta".
    if torch.cuda.is_available() and next(model.parameters()).device.type != "cpu":
        tune_norm_backward(model.config, train)
    model.is_compiled = True
    model.has_graphs = train.compile == "graphs"
    if train.compile == "model":
        model.is_one_graph = True
        # The loss stays outside: compiled into the graph, its gradients once became zeros.
        model.run_blocks = torch.compile(model.run_blocks, dynamic=False)  # type: ignore[method-assign]
        return
    for block in model.layers:
        block.compile(dynamic=False, mode="reduce-overhead" if model.has_graphs else None)
    # The norms at the ends: eager ones go over the stream four times in fp32.
    for norm in (model.embed_norm, model.norm):
        if norm is not None:
            norm.compile(dynamic=False)


def key_cache_by_kernels(train: TrainConfig) -> None:
    """Say where graphs are kept, and under which kernels."""
    import torch.compiler.config

    use_cache_folder()
    kernels = f"attention={train.kernels.attention},{train.kernels.attention_masked}"
    given = torch.compiler.config.cache_key_tag.partition(" attention=")[0]
    torch.compiler.config.cache_key_tag = f"{given} {kernels}"


def use_cache_folder() -> None:
    """Before anything is compiled: Triton keeps to the folder that it finds first."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # Torch writes its default, which has no public name, down when it first looks: then the user
    # has not chosen it.
    if os.environ.get(CACHE, default_cache_dir()) == default_cache_dir():
        folder = cache_folder("compiled")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            os.environ[CACHE] = str(folder)
        except OSError as error:
            warn(f"compiled graphs are not kept for later runs: {error}")


def tune_norm_backward(model: ModelConfig, train: TrainConfig) -> None:
    """Say how many rows of a micro-batch each program takes in a norm's backward pass, which sums
    along rows and down columns in one kernel. Inductor's guess is half as many programs, which took
    45% longer on an H200; to let it time them finds as good a cut, and takes three seconds of a
    start that compiles (docs/log.md). Where norms of q and k have weights it does: they have more
    and shorter rows than the others, and the setting is one for all."""
    import torch._inductor.config as inductor  # the one place of Inductor's settings

    if _is_cut_by_the_user():
        return
    is_one = not (model.qk_norm and model.norm_is_scaled)
    processors = torch.cuda.get_device_properties().multi_processor_count
    each = train.batch_size * train.seq_len // (PROGRAMS * processors)
    each = min(max(each, FEWEST_ROWS), MOST_ROWS)
    cut = 1 << (each.bit_length() - 1)
    inductor.triton.mix_order_reduction_split_size = cut if is_one else None
    inductor.triton.mix_order_reduction_autotune_split_size = not is_one


@lru_cache
def _is_cut_by_the_user() -> bool:
    """Whether Inductor's setting was made by the user, or is missing; asked before we set it."""
    import torch._inductor.config as inductor

    if not hasattr(inductor.triton, "mix_order_reduction_autotune_split_size"):
        return True
    timed = inductor.max_autotune or inductor.coordinate_descent_tuning
    timed = timed or inductor.triton.mix_order_reduction_autotune_split_size
    return timed or inductor.triton.mix_order_reduction_split_size is not None


def disable_kernel_timing() -> None:
    """Keep Inductor from timing variants of a kernel and taking the fastest: two starts of one run
    could take different ones, whose sums run in another order."""
    import torch._inductor.config as inductor

    if hasattr(inductor, "deterministic"):
        inductor.deterministic = True
    else:
        warn("this torch times compiled kernels before it chooses; a resume may differ in its bits")
