"""An optimizer's steps in a rank, from gradients that are the same under every layout."""

import zlib
from typing import Any

import numpy as np
import torch
from layout_ranks import mesh_of
from torch import Tensor
from torch.distributed.tensor import DTensor

from foundling.config.run import RunConfig
from foundling.model.transformer import Transformer
from foundling.model.initialization import init_weights
from foundling.optim.gradients import UpdateRatio
from foundling.optim.gradients import clip_
from foundling.optim.gradients import group_grad_norms
from foundling.optim.optimizer import set_lr
from foundling.optim.sharded_matrices import box_of
from foundling.runtime.device import DeviceChoice
from foundling.train.state import TrainState
from foundling.train.state import make_state

STEPS = 3


def take_steps(config: RunConfig) -> dict[str, Any]:
    """Whole weights and state after some steps, and what was measured on the way."""
    model = Transformer(config.model)
    init_weights(model, 1)
    choice = DeviceChoice(torch.device("cpu"), torch.float32, "")
    parallel = config.parallel
    state = make_state(model, config.train, config.optim, parallel, mesh_of(parallel), choice)
    found: dict[str, Any] = {}
    for step in range(STEPS):
        give_gradients(state, step)
        found[f"norm {step}"] = float(clip_([p for _, p in state.params()], config.optim.clip))
        norms = group_grad_norms(state.optimizer)
        ratio = UpdateRatio(state.optimizer)
        set_lr(state.optimizer, 0.01)
        state.optimizer.step()
        found |= {f"grad {name} {step}": float(norm) for name, norm in norms.items()}
        found |= {f"moved {name} {step}": float(value) for name, value in ratio.read().items()}
    return found | {name: whole(tensor) for name, tensor in state.tensors().items()}


def give_gradients(state: TrainState, step: int) -> None:
    """Each rank its part of a gradient that depends on the name and the step alone."""
    for name, param in state.params():
        seed = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
        full = torch.randn(param.shape, generator=seed)
        param.grad = part_of(full, param)


def part_of(full: Tensor, param: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return full
    if full.ndim == 1:  # as one column
        box = box_of(_column(param))
        mine = box.of(full[:, None])[:, 0]
    else:
        mine = box_of(param).of(full)
    return DTensor.from_local(
        mine.contiguous(),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def _column(param: DTensor) -> Tensor:
    local = param.to_local()[:, None]
    shape = torch.Size((param.shape[0], 1))
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=shape, stride=(1, 1)
    )


def whole(tensor: Tensor) -> np.ndarray[Any, Any]:
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().numpy()
