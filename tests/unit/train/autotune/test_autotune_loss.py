"""`train.kernels.loss auto`: the fastest that is right, with a reason, once a run."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foundling.config.load import load_config, load_run_config
from foundling.config.run import RunConfig
from foundling.plan.hardware import find_gpu
from foundling.plan.layout import MeshLayout
from foundling.plan.workload import works_of
from foundling.runtime.device import choose_device
from foundling.runtime.run_dir import RunDir
from foundling.train.autotune import loss
from foundling.train.autotune.loss import available_losses, choose_loss
from foundling.train.autotune.present_machine import autotune
from foundling.train.loop import train
from foundling.train.start_point import allowed_changes

CPU = choose_device("cpu", "fp32")
SMALL = {"model.vocab-size": "300", "train.kernels.loss": "auto", "train.compile": "off"}


@pytest.fixture
def config() -> RunConfig:
    return load_config("hamlet", SMALL)


def pretend(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float], **ways: Any) -> None:
    """Other ways beside ours, and what each takes."""
    real = available_losses
    taken = {id(way): seconds[name] for name, way in ways.items()}

    def these(*given: Any) -> Any:
        found, _ = real(*given)
        taken[id(found["fused"])] = seconds["fused"]
        return {"fused": found["fused"], **ways}, {}

    monkeypatch.setattr(loss, "available_losses", these)
    monkeypatch.setattr(loss, "_seconds", lambda *given: taken[id(given[-1])])


def chosen(config: RunConfig) -> tuple[str, str]:
    return choose_loss(config.model, config.train, config.parallel, CPU)


def right(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ head.t(), targets, reduction="sum")


def test_the_fastest_is_taken(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"fused": 2.0, "torch": 1.0, "liger": 3.0}
    pretend(monkeypatch, seconds, torch=right, liger=lambda *given: right(*given))
    found, line = chosen(config)
    assert found == "torch"
    times = "torch 1000.00 ms, fused 2000.00 ms, liger 3000.00 ms"
    assert line == f"loss torch (launched: {times})"


def test_what_is_there_is_timed(config: RunConfig) -> None:
    found, line = chosen(config)
    there = ["fused", "torch"] if hasattr(F, "linear_cross_entropy") else ["fused"]
    assert found in there
    assert len(there) == 1 or all(f"{name} " in line and " ms" in line for name in there)
    assert "liger: it needs a GPU" in line


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda *given: right(*given) * 1.5, "torch: wrong by 5.0e-01 of the norm"),
        (lambda *given: right(*(one.detach() for one in given)) + 0 * right(*given), "wrong by"),
        (lambda *given: right(*given) * math.nan, "wrong by nan"),
        (lambda *given: 1 / 0, "division by zero"),
    ],
)
def test_one_that_is_wrong_is_not(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, wrong: Any, said: str
) -> None:
    pretend(monkeypatch, {"fused": 2.0, "torch": 1.0}, torch=wrong)
    found, line = chosen(config)
    assert found == "fused"
    assert said in line


def test_deterministic_runs_are_not_chosen_by_a_clock(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, {"fused": 2.0, "torch": 1.0}, torch=right)
    torch.use_deterministic_algorithms(True)
    try:
        found, line = chosen(config)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found == "fused"
    assert "deterministic" in line


def test_what_cannot_be_tried_is_told(config: RunConfig) -> None:
    capped = config.replace(model={"logit_softcap": 15.0})
    found, line = chosen(capped)
    assert found == "fused"
    assert "no liger: it needs a GPU" in line
    assert "no torch:" in line
    cut = config.replace(parallel={"shard": 2})
    assert "parallel.shard cuts the head" in chosen(cut)[1]
    named = config.replace(train={"kernels": {"loss": "plain"}})
    assert chosen(named) == ("plain", "")


def test_a_run_records_it_and_a_resume_is_held_to_it(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "run")
    asked = tiny.replace(train={"kernels": {"loss": "auto"}})
    train(asked, run)
    recorded = load_run_config(run.config_path)
    assert recorded.train.kernels.loss in ("fused", "torch")
    before = recorded.replace(train={"kernels": {"loss": "liger"}})
    monkeypatch.setattr(loss, "available_losses", None)
    kept, told = autotune(asked, CPU, resumed_config=before)
    assert kept.train.kernels.loss == "liger"
    assert not any(line.startswith("loss") for line in told)
    cut = asked.replace(parallel={"shard": 2})
    assert (
        autotune(cut, CPU, resumed_config=before)[0].train.kernels.loss == "fused"
    )  # which knows parts of a head
    other = recorded.replace(train={"kernels": {"loss": "plain"}})
    assert [change.field for change in allowed_changes(recorded, other, "x")] == [
        "train.kernels.loss"
    ]


def test_the_plan_takes_it_for_ours(config: RunConfig) -> None:
    ours = config.replace(train={"kernels": {"loss": "fused"}})
    gpu = find_gpu("h200")
    assert works_of(config, MeshLayout(), gpu) == works_of(ours, MeshLayout(), gpu)
