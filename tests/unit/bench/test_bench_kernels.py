"""`bench kernels`, `bench train --profile` and `--memory`: the parts of a step."""

import contextlib
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foundling.bench import kernels as kernels_module
from foundling.bench.kernels import (
    bench_attention,
    bench_loss,
    bench_optimizer,
    best_attention,
    describe_kernels,
)
from foundling.bench.profile import (
    bench_memory,
    bench_profile,
    describe_memory,
    describe_profile,
    needed_work,
)
from foundling.config.errors import RunError
from foundling.config.load import load_config
from foundling.config.run import RunConfig
from foundling.model.kernels.attention_backends import KERNELS, MaskSpec, Sdpa
from foundling.plan.params import count_params, flops_per_token, sizes_of
from foundling.profiling.trace import RANGE
from foundling.runtime import device
from foundling.runtime.device import DeviceChoice, choose_device
from foundling.train.autotune.loss import plain_loss_fn
from foundling.train.oom import _SnapshotTarget, snapshot_note, snapshot_on_oom

QUICK = 0.001


def test_a_profile_adds_up_and_leaves_a_trace(small: RunConfig, tmp_path: Path) -> None:
    file = tmp_path / "traces" / "step.json.gz"
    found = bench_profile(small, file, steps=2, profiled=1, quick=True)
    seconds = {part.name: part.seconds for part in found.parts}
    assert sum(seconds.values()) == pytest.approx(found.step_s)
    for name in ("matrix", "attention", "loss", "elementwise", "optimizer"):
        assert seconds[name] > 0, name
    assert seconds["idle"] >= 0
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert {RANGE + "loss", RANGE + "optimizer"} <= {event.get("name") for event in events}
    text = "\n".join(describe_profile(found))
    assert "matrix" in text
    assert str(file) in text
    assert found.kernels[0][2] >= found.kernels[-1][2]


def test_the_work_of_a_step_is_what_mfu_counts() -> None:
    """Matrix and loss are 6 N, attention is half of 12 L D T for causality and 7/6 for what its
    backward pass makes again."""
    config = load_config("llama-1.24b", {})
    work = needed_work(config, torch.bfloat16)
    tokens, model = 16 * 2048, config.model
    vectors = count_params(model).all - count_params(model).matrices_and_head
    attention_flops = 12 * 16 * 2048 * 2048 * tokens
    whole = flops_per_token(model, 2048) * tokens
    assert work["matrix"] + work["loss"] == whole - attention_flops - 6 * vectors * tokens
    assert work["attention"] == pytest.approx(attention_flops * 7 / 12, rel=1e-3)


def test_narrow_numbers_are_half_the_bytes(small: RunConfig) -> None:
    """The residual stream's among them, as the plan has it; in bf16 weights are cast besides."""
    wide, narrow = (
        needed_work(small, dtype)["elementwise"] for dtype in (torch.float32, torch.bfloat16)
    )
    casts = 12 * sizes_of(small.model).blocks
    assert narrow - casts == wide / 2


def test_every_kernel_is_held_to_float64(small: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Sdpa):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float) -> Tensor:
            return super().attend(q, k, v, None, dropout) * 1.01

    class Absent(Sdpa):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float) -> Tensor:
            raise RuntimeError("No available kernel.\nAborting execution.")

    class Unwilling(Sdpa):
        def refusal(self, spec: MaskSpec, dropout: float) -> str | None:
            return None if spec.is_plain else "takes no mask"

    kernels: dict[str, Any] = {
        "math": KERNELS["math"],
        **{made.name: made for made in (Wrong("wrong"), Absent("absent"), Unwilling("unwilling"))},
    }
    monkeypatch.setattr(kernels_module, "_kernels", lambda _: kernels)
    rows = list(bench_attention(small, seconds=QUICK))
    found = {row.name: row for row in rows}
    masks = ("causal", "documents", "window 8")
    assert set(found) == {f"{mask}, {kernel}" for mask in masks for kernel in kernels}
    for mask in masks:
        assert 0 < found[f"{mask}, math"].figures["error"] < 1e-5
        assert found[f"{mask}, math"].figures["flops_per_s"] > 0
        assert found[f"{mask}, wrong"].figures["error"] > 5e-3
        assert found[f"{mask}, absent"].refusal == "No available kernel."
    assert found["causal, unwilling"].figures["error"] < 1e-5
    assert found["documents, unwilling"].refusal == "takes no mask"
    text = "\n".join(describe_kernels("attention", rows, small))
    assert "documents, absent: No available kernel." in text
    assert best_attention(small, choose_device("cpu", "fp32"), QUICK) > 0


def test_short_kernels_are_timed_in_a_row(
    small: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, what is timed is how fast Python launches them."""
    asked = []

    def median_seconds(*_: object, at_least: float = 0.0) -> float:
        asked.append(at_least)
        return 1.0

    monkeypatch.setattr(kernels_module, "median_seconds", median_seconds)
    assert list(kernels_module.bench_attention(small, only=("torch",)))
    assert min(asked, default=0.0) >= 0.005


@pytest.mark.parametrize(("softcap", "z_loss"), [(0.0, 0.0), (5.0, 0.0), (5.0, 0.1)])
def test_every_loss_is_right(small: RunConfig, softcap: float, z_loss: float) -> None:
    config = small.replace(model={"logit_softcap": softcap})
    config = config.replace(train={"z_loss": z_loss})
    rows = {row.name: row for row in bench_loss(config, seconds=QUICK)}
    assert rows.keys() == {"plain", "fused", "torch", "liger"}
    for name in ("plain", "fused"):
        assert rows[name].figures["seconds"] > 0
        assert rows[name].figures["loss_error"] < 1e-6
        assert rows[name].figures["grad_error"] < 1e-5
    if not rows["torch"].refusal:
        assert rows["torch"].figures["grad_error"] < 1e-5
    elif softcap:
        assert "softcap" in rows["torch"].refusal or "no F.linear" in rows["torch"].refusal
    assert "gradient error" in "\n".join(describe_kernels("loss", list(rows.values()), config))


def test_a_loss_in_float8_is_measured_in_float8(small: RunConfig) -> None:
    found = []
    for changes in ({}, {"float8": "rowwise", "float8_skip": ()}):
        config = small.replace(train=changes)  # type: ignore[arg-type]
        (row,) = bench_loss(config, only=("fused",), seconds=QUICK)
        found.append(row.figures["grad_error"])
    assert found[0] < 1e-4 < found[1] < 0.3


def test_a_loss_that_is_wrong_shows(small: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    right = plain_loss_fn(small.model, small.train)
    monkeypatch.setattr(
        "foundling.bench.kernels.losses", lambda *_: {"wrong": lambda *given: right(*given) * 1.1}
    )
    (row,) = bench_loss(small, seconds=QUICK)
    assert row.figures["loss_error"] == pytest.approx(0.1, rel=1e-3)
    assert row.figures["grad_error"] == pytest.approx(0.1, rel=1e-3)


def test_optimizers_by_time_and_state(small: RunConfig) -> None:
    rows = list(bench_optimizer(small, only=("loop", "fused"), seconds=QUICK))
    assert [row.name for row in rows] == ["adamw loop", "adamw fused"]
    for row in rows:
        assert row.figures["seconds"] > 0
        assert row.figures["state_per_param"] == pytest.approx(8, rel=0.01)
    everything = list(bench_optimizer(small, seconds=QUICK))
    assert any(row.name.startswith("optim.name") and not row.refusal for row in everything)
    assert "bytes a parameter" in "\n".join(describe_kernels("optimizer", everything, small))


def test_memory_grows_layer_by_layer_and_goes_back(small: RunConfig) -> None:
    found = bench_memory(small)
    held = {moment.name: moment.allocated for moment in found.moments}
    weights = 4 * count_params(small.model).all
    order = ["between steps", "forward, layer 0", "forward, layer 1", "forward, head and loss"]
    assert list(held)[:4] == order
    wanted = ["backward, head", "backward, layer 1", "backward, layer 0", "backward, all; clipped"]
    assert list(held)[4:8] == wanted
    assert held["between steps"] < held["forward, layer 0"] < held["forward, layer 1"]
    layer = held["forward, layer 1"] - held["forward, layer 0"]
    assert layer > 4 * 4 * 32 * 32, "a layer keeps at least its input"
    assert held["optimizer"] - held["end of step"] >= weights, "gradients are dropped"
    assert found.held["weights"] >= weights
    assert found.held["optimizer"] >= 2 * weights
    assert found.peak >= max(held.values())
    assert "forward, layer 1" in "\n".join(describe_memory(found))
    again = bench_memory(small.replace(parallel={"recompute": "all"}))
    less = {moment.name: moment.allocated for moment in again.moments}
    assert less["forward, layer 1"] < held["forward, layer 1"]


@pytest.mark.parametrize(
    "part", [bench_attention, bench_loss, bench_optimizer, bench_memory], ids=lambda f: f.__name__
)
def test_a_part_is_measured_as_the_run_computes_it(
    part: Callable[..., Any], small: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deterministic and in tf32, where that is asked for."""
    found: list[tuple[bool, str]] = []
    tf32 = DeviceChoice(torch.device("cpu"), torch.float32, "", "tf32")
    monkeypatch.setattr(device, "choose_device", lambda *_: tf32)

    def noted(*_: Any, **__: Any) -> Any:
        repeats = torch.are_deterministic_algorithms_enabled()
        found.append((repeats, torch.get_float32_matmul_precision()))
        raise RuntimeError("seen enough")

    name = part.__name__.removeprefix("bench_")
    measures = "StepRunner" if part is bench_memory else f"_measured_{name}"
    monkeypatch.setattr(f"{part.__module__}.{measures}", noted)
    repeated = small.replace(train={"deterministic": True})
    try:
        with contextlib.suppress(RuntimeError):
            list(part(repeated))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
    assert set(found) == {(True, "high")}


@pytest.mark.parametrize("bench", [bench_memory, bench_profile], ids=lambda f: f.__name__)
def test_a_bench_that_runs_out_of_memory_names_its_snapshot(
    bench: Callable[..., Any], small: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_much(*_: Any) -> None:
        assert _SnapshotTarget.path is not None
        _SnapshotTarget.path.parent.mkdir(exist_ok=True)
        _SnapshotTarget.path.write_bytes(b"as the allocator's observer does")
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setenv("FOUNDLING_HOME", str(tmp_path))
    monkeypatch.setattr(f"{bench.__module__}.StepRunner", too_much)
    given = [tmp_path / "trace.json"] if bench is bench_profile else []
    with pytest.raises(RunError, match=r"give a smaller --batch.*oom-rank0\.pickle"):
        bench(small, *given)


def test_memory_that_runs_out_names_its_snapshot(tmp_path: Path) -> None:
    def too_much() -> None:
        assert _SnapshotTarget.path is not None
        _SnapshotTarget.path.write_bytes(b"as the allocator's observer does")
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError) as failed, snapshot_on_oom(tmp_path):
        too_much()
    assert str(tmp_path / "oom-rank0.pickle") in snapshot_note(failed.value)
    assert _SnapshotTarget.path is None
    with pytest.raises(torch.OutOfMemoryError) as silent, snapshot_on_oom(tmp_path / "none"):
        raise torch.OutOfMemoryError("no room")
    assert snapshot_note(silent.value) == ""
