"""Logits of a model whose weights stay on the disk: each is read when its module runs.

A module without weights (on torch's meta device) is given hooks that read a parameter before it is
used and drop it after. So two models can be compared in the memory of one matrix, and transformers'
own classes run this way as ours do.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundling.config import ModelConfig
from foundling.model import empty_model
from foundling.model.lookup import Lookup
from foundling.model.loss import cap

Read = Callable[[str], Tensor]
BLOCK = 1 << 20
"""Numbers of a matrix that are made fp32 at once: they stay in the processor's cache."""


def our_logits(model: ModelConfig, read: Read, tokens: Tensor) -> Tensor:
    """Logits [T, V] of tokens [1, T], in fp32; every parameter is read once."""
    empty = empty_model(model, "meta").eval()
    head = "embed.weight" if model.tie_embeddings else "head.weight"
    with torch.inference_mode():
        stream_weights(empty, read)
        hidden = empty.hidden(tokens)[0]
        logits = _product(hidden, read(head))
    return cap(logits, model.logit_softcap) if model.logit_softcap else logits


def stream_weights(module: nn.Module, read: Read) -> None:
    """Let every part of a module read its own parameters when it runs."""
    for name, part in module.named_modules():
        mine = part.named_parameters(recurse=False)
        own = [own_name for own_name, value in mine if value.device.type == "meta"]
        if not own:
            continue
        prefix = f"{name}." if name else ""
        wide: Any = part
        if type(part) in (nn.Embedding, Lookup):
            wide.forward = partial(_look_up, part, read, prefix)
        elif type(part) is nn.Linear:
            wide.forward = partial(_multiply, read, prefix, part.bias is not None)
        else:
            part.register_forward_pre_hook(partial(_load, read, prefix, own))
            part.register_forward_hook(partial(_drop, own))


def _look_up(part: nn.Embedding, read: Read, prefix: str, ids: Tensor, *_: Any) -> Tensor:
    return F.embedding(ids, read(f"{prefix}weight")).float()


def _multiply(read: Read, prefix: str, has_bias: bool, x: Tensor) -> Tensor:
    product = _product(x, read(f"{prefix}weight"))
    return product + read(f"{prefix}bias").float() if has_bias else product


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in fp32, some rows of the weight at a time: a whole table of embeddings in fp32
    would be twice a shard in bf16."""
    rows = max(1, BLOCK // weight.shape[1])
    parts = (weight[start : start + rows] for start in range(0, len(weight), rows))
    return torch.cat([x @ part.float().T for part in parts], -1)


def _load(read: Read, prefix: str, own: list[str], part: nn.Module, _: Any) -> None:
    for name in own:
        wide = read(prefix + name).float()
        part._parameters[name] = nn.Parameter(wide, requires_grad=False)


def _drop(own: list[str], part: nn.Module, *_: Any) -> None:
    for name in own:
        old = part._parameters[name]
        assert old is not None
        empty = torch.empty(old.shape, device="meta")
        part._parameters[name] = nn.Parameter(empty, requires_grad=False)
