"""Every layout on one GPU, over NCCL: a group of one rank, wrapped as many would be.

What it shows: the wrappers, their collectives and mixed precision work on this device and compute
what the plain model computes. Several ranks are tested with gloo (tests/dist).
"""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from foundling.config.model import ModelConfig
from foundling.config.parallel import ParallelConfig
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer
from foundling.parallel.apply import _replicated
from foundling.parallel.fsdp import apply_shard
from foundling.parallel.fsdp1 import apply_fsdp1
from foundling.parallel.losses import LossModule
from foundling.parallel.mesh import AXES, Mesh
from foundling.parallel.tensor_parallel import apply_tensor, sum_replicated_gradients
from foundling.plan.layout import MeshLayout
from foundling.runtime.dist import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
MODEL = ModelConfig(vocab_size=512, dim=128, layers=3, heads=4, ffn_dim=256)
DEVICE = torch.device("cuda", 0)
Wrap = Callable[[Transformer, Mesh], nn.Module]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # whatever port is free
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=DEVICE)
    yield Mesh(World(), MeshLayout(), init_device_mesh("cuda", (1, 1, 1), mesh_dim_names=AXES))
    dist.destroy_process_group()


def ddp(model: Transformer, mesh: Mesh) -> nn.Module:
    return _replicated(LossModule(model), ParallelConfig(), DEVICE)


def compressed(model: Transformer, mesh: Mesh) -> nn.Module:
    return _replicated(LossModule(model), ParallelConfig(reduce_dtype="bf16"), DEVICE)


def fsdp2(model: Transformer, mesh: Mesh) -> nn.Module:
    apply_shard(model, ParallelConfig(), mesh)
    return LossModule(model)


def fsdp1(model: Transformer, mesh: Mesh) -> nn.Module:
    return apply_fsdp1(LossModule(model), ParallelConfig(), mesh, DEVICE)


def tensor(model: Transformer, mesh: Mesh) -> nn.Module:
    apply_tensor(model, mesh.axis("tensor"))
    return LossModule(model)


def shard_and_tensor(model: Transformer, mesh: Mesh) -> nn.Module:
    apply_tensor(model, mesh.axis("tensor"))
    apply_shard(model, ParallelConfig(), mesh)
    return LossModule(model)


def plain(model: Transformer, mesh: Mesh) -> nn.Module:
    return LossModule(model)


def losses(wrap: Wrap, mesh: Mesh, dtype: torch.dtype) -> list[float]:
    model = Transformer(MODEL)
    init_weights(model, 1)
    module = wrap(model.to(DEVICE), mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(10):
        tokens = torch.randint(512, (4, 65), generator=generator).to(DEVICE)
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            total, count = module(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None)
        (total / count).backward()
        if wrap in (tensor, shard_and_tensor):
            sum_replicated_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        found.append((total / count).item())
    return found


@pytest.mark.parametrize("wrap", [ddp, compressed, fsdp2, fsdp1, tensor, shard_and_tensor])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layout_computes_what_the_plain_model_does(
    wrap: Wrap, dtype: torch.dtype, mesh: Mesh
) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    if wrap is compressed:
        tolerance = 2e-3
    expected = losses(plain, mesh, dtype)
    assert losses(wrap, mesh, dtype) == pytest.approx(expected, rel=tolerance)
    assert expected[-1] < expected[0]
