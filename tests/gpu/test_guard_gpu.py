"""On a GPU: the hash is the CPU's, NCCL's flight recorder can be written down, and a step that is
refused changes nothing."""

import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from foundling.config.model import ModelConfig
from foundling.config.optim import OptimConfig
from foundling.config.parallel import ParallelConfig
from foundling.config.run import GuardConfig
from foundling.data.batch import Batch, Bounds, Counts
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer
from foundling.optim.optimizer import build_optimizer
from foundling.parallel.apply import apply_parallel
from foundling.parallel.mesh import ALONE
from foundling.runtime.dist import World, flight_record
from foundling.train import step as step_module
from foundling.train.faults.anomaly import AnomalyGuard, RefusedStepError
from foundling.train.faults.memory_leak import gauges_of
from foundling.train.faults.replicas import hash_of
from foundling.train.state import TrainState, named_tensors
from foundling.train.step import StepOptions, StepResult, train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hash_does_not_depend_on_the_device(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    tensor = torch.randn(3_000_001).to(dtype)
    assert hash_of(tensor.cuda()).item() == hash_of(tensor).item()
    assert hash_of(tensor.cuda()).item() == hash_of(tensor.cuda()).item()


def test_nccls_flight_recorder_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29519",
        "TORCH_FR_BUFFER_SIZE": os.environ.get("TORCH_FR_BUFFER_SIZE", "100"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    try:
        dist.all_reduce(torch.ones(3, device="cuda"))
        torch.cuda.synchronize()
        found = flight_record()
    finally:
        dist.destroy_process_group()
    assert b"all_reduce" in found["nccl.json"].lower()
    assert found["nccl.trace"]


def test_cuda_memory_is_looked_at() -> None:
    read, room = gauges_of(torch.device("cuda", 0))["CUDA memory"]
    before = read()
    kept = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    assert read() - before >= kept.numel()
    assert room > before


OPTIMIZERS = {
    "adamw": OptimConfig(),
    "adamw8bit": OptimConfig(name="adamw8bit"),
    "muon": OptimConfig(name="muon"),
}


def state_of(optim: OptimConfig) -> TrainState:
    model = Transformer(ModelConfig(vocab_size=512, dim=128, layers=2, heads=2, ffn_dim=256)).cuda()
    init_weights(model, 1)
    optimizer = build_optimizer(model.named_parameters(), optim)
    module = apply_parallel(model, ParallelConfig(), ALONE)
    return TrainState(model, module, optimizer, World(), CUDA, torch.bfloat16, seed=1)


def batch(number: int) -> Batch:
    tokens = np.random.default_rng(number).integers(0, 512, (4, 65))
    counts = Counts(256, 256, 256)
    bounds = Bounds.of(np.zeros((4, 64), np.int32))
    return Batch(tokens[:, :-1], tokens[:, 1:].copy(), bounds, counts, {"a": counts}, {"a": 4})


def step(state: TrainState, number: int) -> StepResult:
    options = StepOptions(lr=1e-2, clip=1.0, sources=["a"])
    return train_step(state, [batch(number)], options, AnomalyGuard(GuardConfig()))


def everything(state: TrainState) -> dict[str, torch.Tensor]:
    found = {k: v.clone() for k, v in named_tensors(state.params(), state.optimizer).items()}
    for name, param in state.params():
        if "step" in state.optimizer.state[param]:
            found[f"{name}.count"] = state.optimizer.state[param]["step"].clone()
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_not_finite_changes_nothing_on_the_device(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of(OPTIMIZERS[name])
    step(state, 0)
    before = everything(state)
    real = step_module._accumulate

    def poisoned(state: TrainState, *rest: Any) -> torch.Tensor:
        total = real(state, *rest)
        for _, param in state.params():
            assert param.grad is not None
            param.grad *= torch.nan
        return total

    with monkeypatch.context() as patch:
        patch.setattr(step_module, "_accumulate", poisoned)
        with pytest.raises(RefusedStepError):
            step(state, 1)
    assert state.step == 1
    for key, tensor in everything(state).items():
        assert torch.equal(tensor, before[key]), key
    state.optimizer.zero_grad(set_to_none=True)  # as rollback.handle_refused_step does
    assert step(state, 3).step == 2
    assert any(not torch.equal(tensor, before[key]) for key, tensor in everything(state).items())
