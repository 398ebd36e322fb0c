"""A model that is too large for one process: born in parts.

The model is built without memory (on the meta device), cut, given memory for its own parts, and
each part is taken out of the value that the whole parameter would have. At no time does a process
hold more than one whole parameter, and the weights are those of every other layout.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from foundling.model import Transformer
from foundling.model.init import initial_value


def fill_parts(model: Transformer, seed: int) -> None:
    """Give every parameter its initial value, or the part of it that is held here."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = initial_value(name, parameter.shape, model.config, seed)
            put_part(parameter, whole)


def put_part(parameter: Tensor, whole: Tensor) -> None:
    """Copy into `parameter` what it holds of `whole`."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    shape, offset = compute_local_shape_and_global_offset(
        whole.shape, parameter.device_mesh, parameter.placements
    )
    part = whole[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))]
    parameter.to_local().copy_(part)


def local_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes that this process holds of these parameters."""
    parts = (p.to_local() if isinstance(p, DTensor) else p for p in parameters)
    return sum(part.numel() * part.element_size() for part in parts)
