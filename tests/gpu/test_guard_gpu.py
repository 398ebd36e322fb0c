"""On a GPU: the hash is the CPU's, and NCCL's flight recorder can be written down."""

import os

import pytest
import torch
import torch.distributed as dist

from foundling.runtime.dist import flight_record
from foundling.train.memory_trend import gauges_of
from foundling.train.replicas import hash_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


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
