"""What is told as held: under CUDA graphs the allocator does not know."""

import pytest
import torch

from foundling.train.memory import forget_peak, memory_now

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def test_what_graphs_hold_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"memory_allocated": 1, "memory_reserved": 11, "max_memory_allocated": 2}
    for name, value in (told | {"max_memory_reserved": 12}).items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    assert memory_now(CUDA)["memory_peak"] == 2
    with_graphs = memory_now(CUDA, graphs=True)
    assert with_graphs["memory_peak"] == with_graphs["memory_peak_reserved"] == 12
    assert with_graphs["memory_allocated"] == 1


def test_a_cpus_peak_is_the_process_own() -> None:
    forget_peak(CPU)
    before = memory_now(CPU)["memory_peak"]
    held = torch.ones(1 << 24)  # 64 MB
    assert memory_now(CPU, graphs=True)["memory_peak"] > before + held.nbytes // 2
