"""Compiled training is eager training: with accumulation, recompute, an evaluation between steps,
rows of changing length and a resume, all in one course of steps.

Graphs are taken and differentiated as the compiler does it; translating them too takes it minutes
for the whole matrix, so that is done in the full suite.
"""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

from foundling.config.errors import ConfigError
from foundling.config.model import ModelConfig
from foundling.config.optim import OptimConfig
from foundling.config.parallel import ParallelConfig
from foundling.config.run import RunConfig
from foundling.config.train import TrainConfig
from foundling.data.batch import Batch, Bounds, Counts
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer
from foundling.parallel.compile import CACHE, key_cache_by_kernels
from foundling.parallel.mesh import ALONE
from foundling.runtime.device import choose_device
from foundling.train.state import TrainState, make_state
from foundling.train.step import StepOptions, train_step

MODEL = ModelConfig(vocab_size=50, dim=16, layers=2, heads=2, ffn_dim=32)
LENGTHS = (16, 16, 24, 16)
"""Of the rows of each step."""
EVALUATED, RESUMED = 1, 2
"""Steps after which that is done."""
POLICIES = ("none", "all", "every-2", "per-op", "ffn")
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    # Inductor imports old parts of torch, and looks into every module that is there.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing compiled before, nothing left behind."""
    import torch._functorch.config as budget

    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.config.recompile_limit = limit
    budget.activation_memory_budget = 1.0
    torch._dynamo.reset()


@pytest.fixture
def traced(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the translation into machine code."""
    real, whole = nn.Module.compile, torch.compile

    def compile_block(self: nn.Module, **options: Any) -> None:
        options.pop("mode", None)
        real(self, backend="aot_eager", **options)

    monkeypatch.setattr(nn.Module, "compile", compile_block)
    monkeypatch.setattr(torch, "compile", partial(whole, backend="aot_eager"))


def built(mode: str, policy: str) -> TrainState:
    model = Transformer(MODEL)
    init_weights(model, 1)
    train = TrainConfig(compile=mode, kernels={"attention": "torch", "attention_masked": "torch"})  # type: ignore[arg-type]
    config = RunConfig(
        model=MODEL, optim=OptimConfig(), train=train, parallel=ParallelConfig(recompute=policy)
    )
    return make_state(
        model, config.train, config.optim, config.parallel, ALONE, choose_device("cpu", "fp32")
    )


def batch(step: int, micro: int) -> Batch:
    tokens = np.random.default_rng((step, micro)).integers(50, size=(2, LENGTHS[step] + 1))
    inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()
    counts = Counts(inputs.size, inputs.size, inputs.size)
    bounds = Bounds.of(np.zeros(inputs.shape, np.int32))
    return Batch(inputs, targets, bounds, counts, {"a": counts}, {"a": 2})


def resumed(state: TrainState, mode: str, policy: str) -> TrainState:
    """Another process's state, as a checkpoint would bring it there."""
    other = built(mode, policy)
    for name, tensor in other.tensors().items():
        tensor.copy_(state.tensors()[name])
    other.restore(state.meta(), other.tensors())
    return other


def course(mode: str, policy: str) -> list[float]:
    """Every loss and gradient norm of a few steps, and of an evaluation between two of them."""
    state, found = built(mode, policy), []
    for step in range(len(LENGTHS)):
        result = train_step(
            state,
            [batch(step, micro) for micro in (0, 1)],
            StepOptions(lr=1e-2, clip=1.0, sources=["a"]),
        )
        found += [result.loss, result.grad_norm]
        if step == EVALUATED:
            graphs = counters["stats"]["unique_graphs"]
            rows = torch.arange(40).view(2, 20) % 50
            with torch.no_grad():
                found.append(float(state.model.loss(rows, rows)[0]))
            assert counters["stats"]["unique_graphs"] == graphs  # it has shapes of its own
        if step == RESUMED:
            state = resumed(state, mode, policy)
    return found


def check(mode: str, policy: str) -> None:
    eager = course("off", "none")
    assert counters["stats"]["unique_graphs"] == 0
    assert course(mode, policy) == pytest.approx(eager, rel=1e-5)
    assert counters["stats"]["unique_graphs"] >= len(set(LENGTHS))


@pytest.mark.parametrize(
    ("mode", "policy"),
    [*(("blocks", policy) for policy in POLICIES), ("model", "none"), ("model", "per-op")],
)
def test_a_compiled_course_is_the_eager_one(mode: str, policy: str, traced: None) -> None:
    check(mode, policy)


@pytest.mark.full
@pytest.mark.parametrize("policy", [*POLICIES, "budget-0.5"])
@pytest.mark.parametrize("mode", ["blocks", "model"])
def test_every_translated_course_is_the_eager_one(mode: str, policy: str, fresh: None) -> None:
    check(mode, policy)


def test_a_budget_is_the_models_own_and_needs_a_compiler(traced: None) -> None:
    import torch._functorch.config as budget

    built("blocks", "budget-0.5")
    assert budget.activation_memory_budget == 0.5
    built("blocks", "none")
    assert budget.activation_memory_budget == 1.0
    with pytest.raises(ConfigError, match=r"while train\.compile is off"):
        built("off", "budget-0.5")


def test_the_kernels_are_part_of_the_key(
    traced: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch.compiler.config
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv(CACHE, default_cache_dir())
    monkeypatch.setenv("FOUNDLING_HOME", str(tmp_path))
    tags = []
    with torch.compiler.config.patch(cache_key_tag="mine"):  # type: ignore[attr-defined]
        for kernel in ("cudnn", "flash", "cudnn"):
            key_cache_by_kernels(TrainConfig(kernels={"attention": kernel}))  # type: ignore[arg-type]
            tags.append(torch.compiler.config.cache_key_tag)
    assert tags[0] == tags[2] == "mine attention=cudnn,auto"
    assert tags[0] != tags[1]
    assert os.environ[CACHE] == str(tmp_path / "compiled")
    monkeypatch.setenv(CACHE, str(tmp_path / "theirs"))
    key_cache_by_kernels(TrainConfig())
    assert os.environ[CACHE] == str(tmp_path / "theirs")
