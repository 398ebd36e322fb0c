"""What is told as held: under CUDA graphs the allocator does not know."""

import pytest
import torch

from foundling.bench.profile import bench_memory
from foundling.config.errors import ConfigError
from foundling.config.model import ModelConfig
from foundling.config.run import RunConfig
from foundling.model.transformer import Transformer
from foundling.parallel.mesh import ALONE
from foundling.runtime.device import choose_device, memory_usage, reset_peak_memory
from foundling.train.state import make_state

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SHAPE = ModelConfig(vocab_size=32, dim=16, layers=1, heads=2, ffn_dim=16)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"memory_allocated": 1, "memory_reserved": 11, "max_memory_allocated": 2}
    for name, value in (told | {"max_memory_reserved": 12}).items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)


@pytest.mark.usefixtures("allocator")
@pytest.mark.parametrize("graphs", [False, True])
def test_what_graphs_hold_counts(graphs: bool) -> None:
    config = RunConfig(model=SHAPE)
    state = make_state(
        Transformer(SHAPE),
        config.train,
        config.optim,
        config.parallel,
        ALONE,
        choose_device("cpu", "fp32"),
    )
    state.model.has_graphs, state.device = graphs, CUDA
    found = state.memory()
    assert found["memory_peak"] == (12 if graphs else 2)
    assert found["memory_peak_reserved"] == 12
    assert found["memory_allocated"] == 1


def test_graphs_cannot_be_weighed_by_moment() -> None:
    config = RunConfig(model=SHAPE)
    train = config.train.replace(compile="graphs", batch_size=1)
    with pytest.raises(ConfigError, match="compile blocks"):
        bench_memory(config.replace(train=train))


def test_a_cpus_peak_is_the_process_own() -> None:
    reset_peak_memory(CPU)
    before = memory_usage(CPU)["memory_peak"]
    held = torch.ones(1 << 24)  # 64 MB
    assert memory_usage(CPU, graphs=True)["memory_peak"] > before + held.nbytes // 2
