"""On a GPU: the benches measure what they say, survive a full card, and catch a false speed."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from foundling.bench.kernels import bench_attention, bench_loss, bench_optimizer
from foundling.bench.profile import bench_memory, bench_profile
from foundling.bench.train import BenchOptions, bench_train
from foundling.config.errors import RunError
from foundling.config.load import load_config
from foundling.config.run import RunConfig
from foundling.model.loss import _HeadLoss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def config(**overrides: str) -> RunConfig:
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    small = {"train.batch-size": "8", "train.seq-len": "1024", "train.compile": "true"}
    return load_config("clm-60m", {**small, "train.device": "cuda", **named})


def test_a_compiled_bf16_trainer_learns_as_its_reference() -> None:
    found = bench_train(config(), BenchOptions(steps=5, check_steps=20))
    assert found.check is not None
    assert found.check.problems == []
    assert found.check.ours.losses[-1] < found.check.ours.losses[0] - 1
    assert 0.02 < found.ours.mfu < 1
    assert found.ours.reserved >= found.ours.allocated > 1e9


def test_gradients_of_zero_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = _HeadLoss.backward

    def zeros(ctx: Any, grad: torch.Tensor) -> Any:
        return right(ctx, grad * 0)

    monkeypatch.setattr(_HeadLoss, "backward", staticmethod(zeros))
    found = bench_train(config(train__kernels__loss="fused"), BenchOptions(steps=2, check_steps=10))
    assert found.check is not None
    assert len(found.check.problems) >= 2


def test_the_search_survives_a_card_that_is_full() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(12e9 / total)
    try:
        found = bench_train(
            config(train__kernels__loss="plain"), BenchOptions(steps=2, best=True, check_steps=0)
        ).ours
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert None in found.tried.values(), "some size did not fit"
    assert found.tokens_per_s > 0


def test_memory_that_runs_out_leaves_a_snapshot(tmp_path: Path) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(4e9 / total)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOUNDLING_HOME", str(tmp_path))
        try:
            with pytest.raises(RunError, match=r"oom-rank0\.pickle"):
                bench_memory(config(train__batch_size="64"))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    assert (tmp_path / "oom" / "oom-rank0.pickle").stat().st_size > 1000


@pytest.mark.alone
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_a_profile_adds_up(compiled: str, tmp_path: Path) -> None:
    found = bench_profile(config(train__compile=compiled), tmp_path / "trace.json.gz", quick=True)
    parts = {part.name: part for part in found.parts}
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.step_s, rel=1e-6)
    for name in ("matrix", "attention", "loss", "elementwise", "optimizer"):
        assert parts[name].seconds > 0, name
    matrix = parts["matrix"]
    assert matrix.rate is not None
    assert matrix.ceiling is not None
    assert 0.05 < matrix.rate / matrix.ceiling < 1.1
    assert (tmp_path / "trace.json.gz").stat().st_size > 1000


def test_attention_kernels_agree_with_float64() -> None:
    rows = list(bench_attention(config(), seconds=0.05))
    ran = [row for row in rows if not row.refusal]
    masks = ({row.name.partition(",")[0] for row in some} for some in (ran, rows))
    assert next(masks) == next(masks), "each mask has a kernel"
    assert all(row.figures["error"] < 0.03 for row in ran), ran


def test_losses_and_optimizers_run() -> None:
    found = {row.name: row for row in bench_loss(config(), seconds=0.05)}
    assert found["fused"].figures["memory"] < found["plain"].figures["memory"] / 2
    assert max(row.figures["grad_error"] for row in found.values() if not row.refusal) < 0.03
    updates = {row.name: row for row in bench_optimizer(config(), seconds=0.05)}
    assert updates["adamw fused"].figures["seconds"] < updates["adamw loop"].figures["seconds"]


@pytest.mark.parametrize("compiled", [False, True])
def test_memory_rises_by_the_layer(compiled: bool) -> None:
    base = config()
    found = bench_memory(base.replace(train={"compile": compiled}))
    held = [m.allocated for m in found.moments if m.name.startswith("forward, layer")]
    steps = [after - before for before, after in pairwise(held)]
    assert len(held) == base.model.layers
    assert min(steps) > 0
    assert max(steps) < 1.5 * min(steps), "layers are alike"
