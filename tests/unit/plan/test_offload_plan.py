"""The plan knows what activation offload saves and costs, and says when it does not pay."""

import pytest
from asking import plan

from foundling.config import ConfigError
from foundling.config.checks import check_trainable
from foundling.config.resolve import resolve
from foundling.plan.activations import offloaded_bytes
from foundling.plan.hardware import find_gpu
from foundling.plan.offload import bus_s, bus_wait_s
from foundling.plan.work import ONE_GPU, work_of

ON = {"parallel.offload-activations": "true"}
LONG = {
    "train.seq-len": "131072",
    "train.batch-size": "1",
    "train.steps": "10",
    "optim.name": "adamw8bit",
}


def test_memory_is_two_blocks_and_the_bus_takes_its_time() -> None:
    rows = {"train.batch-size": "24"}
    plain, away = plan("llama-1.24b", "h200", rows), plan("llama-1.24b", "h200", {**rows, **ON})
    kept = plain.choice.memory.moments["forward"]["activations"]
    left = away.choice.memory.moments["forward"]["activations"]
    assert left < 0.2 * kept
    speed = away.choice.speed
    assert speed.parts["offload"] > 0.5 * speed.step_s
    assert any("does not pay" in told and "recompute none" in told for told in away.warnings)
    assert any("GB pinned" in told for told in away.choice.reasons)
    gpu = find_gpu("h200")
    work = work_of(away.config, ONE_GPU, gpu)
    assert bus_s(work, gpu) == pytest.approx(offloaded_bytes(work, gpu) / 50.4e9)
    assert offloaded_bytes(work, gpu) == pytest.approx(kept * 15 / 16, rel=0.01)


def test_what_the_work_hides_costs_nothing() -> None:
    settings = {"train.batch-size": "64", "parallel.recompute": "all"}
    gpu = find_gpu("h200")
    work = work_of(resolve("llama-1.24b", {**settings, **ON}), ONE_GPU, gpu)
    busy = {"matrix": 2.0}
    assert bus_wait_s(work, gpu, busy) == 0
    assert bus_wait_s(work, gpu, {"matrix": 0.1}) == pytest.approx(
        2 * bus_s(work, gpu) - 0.1 * 15 / 16, rel=1e-6
    )


def test_auto_takes_it_only_where_it_pays() -> None:
    auto = {"parallel.offload-activations": "auto", "parallel.recompute": "auto"}
    roomy = plan("llama-1.24b", "h200", {**auto, "train.batch-size": "24"})
    assert roomy.config.parallel.offload_activations is False
    # Rows so long that not even the blocks' inputs fit beside the weights.
    tight = plan("llama3.2-3b", "h100-less", {**auto, **LONG})
    assert tight.config.parallel.offload_activations is True
    assert tight.fits
    assert not any("does not pay" in told for told in tight.warnings)
    forced = plan("llama3.2-3b", "h100-less", {"parallel.recompute": "auto", **LONG})
    assert not forced.fits


def test_it_goes_with_what_the_compiler_keeps() -> None:
    settings = {"train.batch-size": "24", **ON}
    kept = plan("llama-1.24b", "h200", settings).choice
    less = plan("llama-1.24b", "h200", {**settings, "parallel.recompute": "per-op"}).choice
    assert less.speed.parts["offload"] < kept.speed.parts["offload"]


@pytest.fixture(autouse=True)
def a_card(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hardware.yaml"  # type: ignore[operator]
    file.write_text("h100-less: {like: h100-pcie, memory: 62e9}\n")
    monkeypatch.setenv("FOUNDLING_HARDWARE", str(file))


def test_a_run_needs_it_decided() -> None:
    config = resolve("hamlet", {"parallel.offload-activations": "auto"})
    with pytest.raises(ConfigError, match=r"parallel.offload_activations is left to the plan"):
        check_trainable(config)
