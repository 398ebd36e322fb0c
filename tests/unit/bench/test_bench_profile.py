"""`bench train --profile`: whose time a kernel is, and which ceiling a part is held to."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foundling.bench import profile
from foundling.bench.profile import (
    StepPart,
    bench_profile,
    describe_profile,
    document_lengths,
    needed_work,
)
from foundling.config.run import RunConfig
from foundling.plan.hardware import Ceilings, MatmulRate
from foundling.plan.params import count_params
from foundling.profiling.ceilings import measure_ceilings
from foundling.profiling.step_runner import document_numbers
from foundling.runtime import device
from foundling.runtime.device import DeviceChoice, choose_device
from foundling.train import step
from tests.unit.bench.changed import set_in

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ceilings() -> Ceilings:
    return measure_ceilings(CPU, quick=True)


@pytest.fixture
def exact() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


def test_clipping_is_the_optimizers(
    small: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "TOP", 10**6)
    before = step.clip_  # type: ignore[attr-defined]
    found = bench_profile(small, tmp_path / "trace.json", steps=1, profiled=1, quick=True)
    assert step.clip_ is before  # type: ignore[attr-defined]
    parts: dict[str, set[str]] = {}
    for part, name, *_ in found.kernels:
        parts.setdefault(name, set()).add(part)
    assert parts["aten::_foreach_norm"] == {"optimizer"}
    assert parts["aten::_foreach_mul_"] == {"optimizer"}
    assert parts["aten::_fused_adamw_"] == {"optimizer"}


def test_a_device_that_waits_for_its_host_is_told_so(
    small: RunConfig, ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "best_attention", lambda *_, **__: 1e12)
    gpu = DeviceChoice(torch.device("cuda"), torch.bfloat16, "bf16")

    def note(config: RunConfig, choice: DeviceChoice = gpu, idle_ms: float = 11) -> str:
        seconds = {"matrix": 0.047, "idle": idle_ms / 1e3}
        parts = profile._parts(config, choice, seconds, ceilings, None)
        return {part.name: part.note for part in parts}["idle"]

    by_blocks = set_in(small, "train", compile="blocks")
    assert "--train.compile graphs" in note(by_blocks)
    assert "--train.compile blocks" in note(set_in(small, "train", compile="off"))
    for other in (
        set_in(small, "train", compile="graphs"),
        set_in(small, "train", compile="model"),
    ):
        assert "larger micro-batches" in note(other)
        assert "--train.compile" not in note(other)
    assert note(by_blocks, idle_ms=5) == ""
    assert note(by_blocks, choose_device("cpu", "fp32")) == ""


def test_float8_is_held_to_its_own_ceiling_or_to_none(small: RunConfig, ceilings: Ceilings) -> None:
    config, choice = set_in(small, "train", float8="rowwise"), choose_device("cpu", "fp32")

    def matrix(config: RunConfig, measured: Ceilings) -> StepPart:
        found = profile._parts(config, choice, {"matrix": 1.0, "loss": 1.0}, measured, None)
        parts = {part.name: part for part in found}
        assert parts["loss"].ceiling == measured.matmul_peak("fp32"), "the head stays as it was"
        return parts["matrix"]

    assert matrix(small, ceilings).ceiling == ceilings.matmul_peak("fp32")
    assert matrix(small, ceilings).note == ""
    assert matrix(config, ceilings).ceiling is None
    assert "float8" in matrix(config, ceilings).note
    narrow = MatmulRate(dtype="fp8", m=1, k=1, n=1, flops_per_s=7e15)
    known = replace(ceilings, matmul=(*ceilings.matmul, narrow))
    assert matrix(config, known).ceiling == 7e15
    assert matrix(config, known).note == ""


def test_logits_in_float8_are_held_to_both_ceilings(small: RunConfig, ceilings: Ceilings) -> None:
    config = set_in(small, "train", float8="tensorwise", float8_skip=())

    def loss(measured: Ceilings) -> StepPart:
        found = profile._parts(config, choose_device("cpu", "fp32"), {"loss": 1.0}, measured, None)
        return next(part for part in found if part.name == "loss")

    assert loss(ceilings).ceiling is None
    assert "float8" in loss(ceilings).note
    wide = ceilings.matmul_peak("fp32")
    narrow = MatmulRate(dtype="fp8", m=1, k=1, n=1, flops_per_s=4 * wide)
    known = replace(ceilings, matmul=(*ceilings.matmul, narrow))
    assert loss(known).ceiling == pytest.approx(wide * 3 / 2.25)


def test_tf32_is_held_to_products_made_in_tf32(
    small: RunConfig,
    ceilings: Ceilings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    exact: None,
) -> None:
    seen: list[str] = []

    def measure(*_: Any, **__: Any) -> Ceilings:
        seen.append(torch.get_float32_matmul_precision())
        return ceilings

    monkeypatch.setattr(profile, "measure_ceilings", measure)
    for asked in ("tf32", "fp32"):
        choice = DeviceChoice(CPU, torch.float32, "", asked)
        monkeypatch.setattr(device, "choose_device", lambda *_, choice=choice: choice)
        found = bench_profile(small, tmp_path / "trace.json", steps=1, profiled=1)
        assert found.products == asked
        assert f"the best {asked} product" in "\n".join(describe_profile(found))
    assert seen == ["high", "highest"]


def test_bytes_of_an_update_are_the_optimizers_own(small: RunConfig, ceilings: Ceilings) -> None:
    count = count_params(small.model).all
    for name, clip, each in (("adamw", 1.0, 40), ("adamw", 0.0, 32), ("adamw8bit", 1.0, 28)):
        work = needed_work(set_in(small, "optim", name=name, clip=clip), torch.float32)
        assert work["optimizer"] == each * count
    muon = set_in(small, "optim", name="muon")
    (part,) = profile._parts(muon, choose_device("cpu", "fp32"), {"optimizer": 1.0}, ceilings, None)
    assert part.rate is None
    assert "Muon" in part.note


def test_documents_are_counted_apart(small: RunConfig, tmp_path: Path) -> None:
    documents = np.stack([document_numbers(row, 32) for row in range(4)])
    lengths = document_lengths(documents)
    assert sum(lengths) == 4 * 32
    whole = needed_work(small, torch.float32)["attention"]
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    apart = needed_work(small, torch.float32, lengths)["attention"]
    assert apart / whole == pytest.approx(pairs / (4 * 32 * 33 / 2))
    masked = set_in(small, "data", document_mask=True)
    found = bench_profile(masked, tmp_path / "trace.json", steps=1, profiled=1, quick=True)
    assert "in documents" in "\n".join(describe_profile(found))
    (attention,) = (part for part in found.parts if part.name == "attention")
    assert attention.ceiling
