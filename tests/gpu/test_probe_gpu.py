"""On a GPU: recompute saves what it promises, and the probe's parts and bytes hold together."""

from pathlib import Path

import pytest
import torch

from foundling.config.load import load_config
from foundling.config.run import RunConfig
from foundling.plan.hardware import load_ceilings, save_ceilings
from foundling.profiling.ceilings import measure_ceilings
from foundling.profiling.probe import probe
from foundling.profiling.trace import PARTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def config(**overrides: str) -> RunConfig:
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    small = {"train.batch-size": "8", "train.seq-len": "1024", "train.horizon": "10"}
    return load_config("clm-60m", {**small, "train.device": "cuda", **named})


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("loss", ["fused", "plain"])
def test_parts_add_up_and_none_is_missing(compiled: str, loss: str) -> None:
    found = probe(config(train__compile=compiled, train__kernels__loss=loss), steps=3)
    assert sum(found.parts.values()) == pytest.approx(found.step_s, rel=1e-6)
    for name in PARTS:
        assert found.parts[name] > 0, name
    # The head is two fifths of this model's products; were it not seen, the loss would be nothing.
    # Of the kernels alone: whoever shares the device or its host makes the rest of the step longer.
    assert found.parts["loss"] > 0.05 * (found.step_s - found.parts["other"])
    assert found.parts["matrix"] > found.parts["optimizer"]


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_recompute_saves_memory(compiled: str) -> None:
    peaks = {
        policy: probe(config(parallel__recompute=policy, train__compile=compiled), steps=1).memory[
            "forward"
        ]["allocated"]
        for policy in ("none", "every-2", "per-op", "all")
    }
    assert peaks["none"] > peaks["every-2"] > peaks["all"]
    assert peaks["none"] > peaks["per-op"] > peaks["all"]


def test_ceilings_come_back_from_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOUNDLING_HOME", str(tmp_path))
    found = measure_ceilings(torch.device("cuda"), quick=True)
    assert load_ceilings(save_ceilings(found)) == found
    assert found.matmul_peak("bf16") > found.matmul_peak("fp32") > 1e12
    assert found.context_bytes > 0
