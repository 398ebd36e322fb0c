"""Initial weights by (seed, parameter name, shape), and rows for a larger vocabulary."""

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from foundling.config.model import ModelConfig
from foundling.model.transformer import Transformer
from foundling.plan.params import head_std

# Each parameter has its own generator, keyed by a hash of the seed and its name, and is drawn on
# the CPU: the order of construction, the device and the layout over processes cannot change a
# value, and several threads can draw at once. Rejected: one global generator, where a new layer or
# a skipped parameter shifts all that follow.
#
# Matrices are N(0, 1/sqrt(fan_in)); those that write into the residual stream (attn.o, ffn.down)
# dim^-0.5 / sqrt(2 layers), so that the stream's variance does not grow with depth; the embedding
# and learned positions `init.std`; the head 1/sqrt(dim) or `init.head_std`. With `init.outputs
# zero` the matrices that write into the stream are zero, so that every block begins as nothing.
# Value embeddings are N(0, 1/sqrt(dim)), little against the values that they are added to, and
# their gates zero, which is a factor of one. Norms are one; biases zero. Residual scales fall over
# the depth as in nanochat's public recipe: 1.15 to 1.05 of the stream, 0.2 to 0.05 of the
# embedding.
#
# The final norm leaves a hidden state of mean square one, so the logits have variance s^2 = C *
# std(head)^2 and the first loss is ln(V) + s^2 / 2 (`plan.head_std`).

DRAWS = ("normal_", "uniform_", "trunc_normal_", "kaiming_uniform_")
MOST_THREADS = 8
"""Each holds one parameter on its way to the device."""


def empty_model(config: ModelConfig, device: torch.device | str = "cpu") -> Transformer:
    """A model whose weights are still to come: torch's own first values, drawn for nothing, would
    take seconds for every billion."""
    with torch.device("meta"), _WithoutDraws():
        model = Transformer(config)
    if torch.device(device).type == "meta":
        return model
    # What `to_empty` does, without asking a meta tensor to describe itself: for the answer torch
    # imports sympy, which takes a quarter of a second.
    model._apply(  # type: ignore[no-untyped-call]
        lambda meta: torch.empty(meta.shape, dtype=meta.dtype, device=device)
    )
    return model


class _WithoutDraws(TorchFunctionMode):
    """Modules are made without first values: on the meta device there is nothing to put them into,
    and torch imports its compiler to find that out, which takes a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in DRAWS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def init_weights(model: Transformer, seed: int) -> None:
    """Fill every parameter in place."""

    def fill(name: str, parameter: Tensor) -> None:
        with torch.no_grad():  # a thread begins with gradients on
            parameter.copy_(initial_value(name, parameter.shape, model.config, seed))

    # The largest first: the embedding alone may take as long as all the rest on the other threads.
    parameters = sorted(model.named_parameters(), key=lambda item: -item[1].numel())
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        for done in [pool.submit(fill, *item) for item in parameters]:
            done.result()


def initial_value(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> Tensor:
    """What a parameter starts with, in fp32 on the CPU."""
    if name.endswith(".mix"):
        depth = int(name.split(".")[1]) / max(config.layers - 1, 1)
        return torch.tensor([1.15 - 0.10 * depth, 0.20 - 0.15 * depth])
    if len(shape) == 1:
        return torch.full(shape, 0.0 if name.endswith(".bias") else 1.0)
    std = weight_std(name, shape, config)
    if not std:
        return torch.zeros(shape)
    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8]
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
    return torch.randn(shape, generator=generator).mul_(std)


def weight_std(name: str, shape: torch.Size, config: ModelConfig) -> float:
    """Standard deviation that a matrix starts with."""
    if name in ("embed.weight", "positions.weight"):
        return config.init.std
    if name == "head.weight":
        return head_std(config)
    if name.endswith(("attn.o.weight", "ffn.down.weight")):
        scaled = float((config.dim * 2 * config.layers) ** -0.5)
        return scaled if config.init.outputs == "scaled" else 0.0
    if name.endswith("value_gate.weight"):
        return 0.0
    if name.startswith("value_embeds."):
        return float(config.dim**-0.5)
    return float(shape[1] ** -0.5)


# More rows for a larger vocabulary.
#
# A new token begins as the mean of all tokens that were trained: in the embedding it says nothing
# in particular, and in the head it is neither likely nor impossible. Random rows would be far from
# the others, which have moved; rows of zeros would get a logit of zero, which after training may be
# far above or below the others.

TABLES = ("embed.weight", "head.weight", "value_embeds.")
"""How the names of weights begin that have a row for each token."""


def grow_vocabulary(weights: Mapping[str, Tensor], *, used: int, size: int) -> dict[str, Tensor]:
    """Weights of a model of `size` tokens: the first `used` rows of each table as they were, and
    every row after them (new ones, and rows that no token had) the mean of those."""
    return {
        name: _grown(weight, used, size) if name.startswith(TABLES) else weight
        for name, weight in weights.items()
    }


def _grown(weight: Tensor, used: int, size: int) -> Tensor:
    if not 0 < used <= len(weight) <= size:
        raise ValueError(f"{used} rows in use of {len(weight)} cannot grow to {size}")
    trained = weight[:used]
    larger = weight.new_empty(size, weight.shape[1])
    larger[:used] = trained
    # Summed in double precision: a hundred thousand bfloat16 rows would lose the small ones.
    larger[used:] = trained.double().mean(dim=0).to(weight.dtype)
    return larger
