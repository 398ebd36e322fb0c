"""Compiled blocks keep one graph for each length of row, however many a run has."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

from foundling.config.model import ModelConfig
from foundling.config.parallel import ParallelConfig
from foundling.config.train import TrainConfig
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer
from foundling.parallel import compile
from foundling.parallel.apply import apply_parallel
from foundling.parallel.mesh import ALONE

MODEL = ModelConfig(vocab_size=50, dim=16, layers=2, heads=2, ffn_dim=32)
LENGTHS = (64, 128, 64, 32, 16, 8, 256, 24, 40, 48, 56, 64)
"""Ten of them: more than the eight after which dynamo would give up in silence."""


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are taken and not translated: how many there are is the question here."""
    real = nn.Module.compile

    def compile_only(self: nn.Module, **options: Any) -> None:
        real(self, backend="eager", **options)

    monkeypatch.setattr(nn.Module, "compile", compile_only)
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.config.recompile_limit = limit
    torch._dynamo.reset()


def losses(compile_blocks: bool) -> list[float]:
    model = Transformer(MODEL)
    init_weights(model, 1)
    module = apply_parallel(
        model, ParallelConfig(), ALONE, TrainConfig(compile="blocks" if compile_blocks else "off")
    )
    found = []
    for length in LENGTHS:
        generator = torch.Generator().manual_seed(length)
        tokens = torch.randint(50, (256 // length, length + 1), generator=generator)
        total, count = module(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None)
        total.backward()
        found.append(total.item() / count.item())
    return found


# Dynamo itself looks at .grad of what is no leaf, behind a filter that does not hold in pytest.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_graph_for_each_length_and_no_retreat(traced: None) -> None:
    assert losses(compile_blocks=True) == pytest.approx(losses(compile_blocks=False), rel=1e-6)
    assert counters["stats"]["unique_graphs"] == 2 * len(set(LENGTHS))  # a block's, the norm's
    assert not counters["graph_break"]


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Inductor's settings on a machine with such a device; they are as they were afterwards."""
    import torch._inductor.config as inductor

    shape = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: shape)
    compile._is_cut_by_the_user.cache_clear()
    untouched = {
        "triton.mix_order_reduction_split_size": None,
        "triton.mix_order_reduction_autotune_split_size": False,
    }
    with inductor.patch(untouched):  # whatever models were compiled in this process before
        yield inductor.triton
    compile._is_cut_by_the_user.cache_clear()


@pytest.mark.parametrize(
    ("rows", "size"), [(90112, 32), (114688, 32), (65536, 16), (8192, 16), (64, 16), (1 << 20, 128)]
)
def test_a_norms_backward_pass_is_cut_for_the_device(rows: int, size: int, h200: Any) -> None:
    train = TrainConfig(batch_size=rows // 64, seq_len=64)
    compile.tune_norm_backward(MODEL, train)
    assert h200.mix_order_reduction_split_size == size
    compile.tune_norm_backward(MODEL.replace(qk_norm=True), train)
    assert h200.mix_order_reduction_split_size is None
    assert h200.mix_order_reduction_autotune_split_size, "rows of two lengths: timed"
    compile.tune_norm_backward(MODEL, train)
    assert h200.mix_order_reduction_split_size == size
    assert not h200.mix_order_reduction_autotune_split_size


@pytest.mark.parametrize(("device", "is_cut"), [("meta", True), ("cpu", False)])
def test_sharded_models_are_cut_before_they_have_weights(
    device: str, is_cut: bool, h200: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: None)
    with torch.device(device):
        model = Transformer(MODEL)
    compile.compile_model(model, TrainConfig(compile="blocks"))
    assert (h200.mix_order_reduction_split_size is not None) == is_cut


def test_what_the_user_told_inductor_stays(h200: Any) -> None:
    h200.mix_order_reduction_split_size = 64
    compile.tune_norm_backward(MODEL, TrainConfig())
    assert h200.mix_order_reduction_split_size == 64
