"""The probe: parts that add up, bytes that are exact, ceilings that survive the disk."""

import json
from pathlib import Path

import pytest
import torch

from foundling.config.errors import ConfigError
from foundling.config.load import load_config
from foundling.config.run import RunConfig
from foundling.plan.hardware import (
    device_slug,
    devices_folder,
    known_ceilings,
    load_ceilings,
    save_ceilings,
)
from foundling.plan.params import count_params
from foundling.profiling import ceilings
from foundling.profiling.ceilings import measure_ceilings
from foundling.profiling.probe import LiveBytes, probe
from foundling.profiling.trace import PARTS, fill_up
from foundling.train.autotune import harness
from foundling.train.autotune.harness import matmul_peak, median_seconds

CPU = torch.device("cpu")


def config(**overrides: str) -> RunConfig:
    shape = {"model.dim": "64", "model.heads": "4", "model.layers": "4", "model.ffn-dim": "128"}
    small = {"model.vocab-size": "300", "train.seq-len": "64", "train.batch-size": "2"}
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_config("hamlet", {**shape, **small, "train.threads": "1", **named})


@pytest.mark.parametrize("overrides", [{}, {"train__kernels__loss": "plain"}])
def test_parts_add_up_to_the_step(overrides: dict[str, str]) -> None:
    found = probe(config(**overrides), steps=3, warmup=1)
    assert set(found.parts) == set(PARTS)
    assert sum(found.parts.values()) == pytest.approx(found.step_s, rel=1e-9)
    for name in ("matrix", "attention", "loss", "elementwise", "optimizer", "other"):
        assert found.parts[name] > 0, name
    assert found.parts["data"] == 0, "a CPU has the rows already"
    assert found.tokens_per_s == pytest.approx(128 / found.step_s)
    assert json.loads(json.dumps(found.to_json()))["peak_bytes"] == found.peak_bytes


def test_the_parts_follow_the_config() -> None:
    """Thirty-two times the vocabulary is more loss, by its share: load changes the seconds."""
    small = probe(config(), steps=3, warmup=1)
    wide = probe(config(model__vocab_size="9600"), steps=3, warmup=1)
    assert wide.parts["loss"] / wide.step_s > 1.5 * small.parts["loss"] / small.step_s


def test_memory_is_exact_where_it_can_be() -> None:
    small = config()
    found = probe(small, steps=1, warmup=1)
    weights = 4 * count_params(small.model).all
    assert found.memory["build"]["allocated"] == weights
    # Weights and two moments stay, the rotary tables of 256 positions, the last micro-batch and a
    # few scalars; after the backward pass the gradients are there too.
    tables = 2 * 256 * 16 * 4
    few = 4096
    assert 0 <= found.memory["step"]["allocated"] - 3 * weights - tables < few
    assert 0 <= found.memory["backward"]["allocated"] - 4 * weights - tables < few
    # The update ratio copies the weights before the step and subtracts after it.
    assert found.measures_update
    assert found.memory["step"]["peak"] >= 5 * weights
    assert found.peak_bytes == max(at["peak"] for at in found.memory.values())


def test_recompute_shows_in_the_memory_and_not_in_the_rest() -> None:
    none, per_op, everything = (
        probe(config(parallel__recompute=policy, model__layers="8"), steps=1, warmup=1)
        for policy in ("none", "per-op", "all")
    )
    forward = [each.memory["forward"]["allocated"] for each in (none, per_op, everything)]
    assert forward[0] > forward[1] > forward[2]
    assert none.memory["build"] == everything.memory["build"]
    assert none.memory["step"] == everything.memory["step"]


def test_accumulation_is_probed_by_two_micro_steps() -> None:
    found = probe(config(train__global_batch_tokens="1024"), steps=1, warmup=1)
    assert (found.micro_steps, found.planned_micro_steps) == (2, 8)
    assert found.planned_step_s > 3 * (found.step_s - found.parts["optimizer"])


def test_a_probe_needs_a_vocabulary() -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size is 0"):
        probe(config(model__vocab_size="0"))


def test_shares_of_a_slowed_step_become_seconds_of_a_real_one() -> None:
    parts = dict.fromkeys(PARTS, 0.0) | {"matrix": 3.0, "loss": 1.0}
    full = fill_up(parts, measured=8.0, step=4.0)
    assert (full["matrix"], full["loss"], full["other"]) == (1.5, 0.5, 2.0)
    overlapping = fill_up(parts, measured=2.0, step=2.0)  # kernels side by side
    assert sum(overlapping.values()) == pytest.approx(2.0)
    assert overlapping["other"] == pytest.approx(0.0)


def test_live_bytes_know_views_and_the_dead() -> None:
    kept = torch.zeros(100)
    with LiveBytes([kept]) as live:
        assert live.now == 400
        made = kept + 1
        view = made[10:].view(9, 10)
        assert live.now == 800
        del made
        assert live.now == 800  # the view holds it
        del view
        assert live.now == 400
        live.reset_peak()
        (kept * 2).sum()
        assert live.peak == 400 + 400 + 4
    assert live.now == 400


def test_ceilings_are_measured_stored_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOUNDLING_HOME", str(tmp_path))
    assert known_ceilings() == {}
    found = measure_ceilings(CPU, quick=True)
    path = save_ceilings(found)
    assert path.parent == devices_folder() == tmp_path / "devices"
    assert load_ceilings(path) == found
    assert known_ceilings() == {path.stem: found}
    assert json.loads(path.read_text())["schema"] == 1
    for rate in (found.copy_bytes_per_s, found.norm_bytes_per_s, found.optimizer_bytes_per_s):
        assert 1e7 < rate < 1e13
    assert 1e8 < found.matmul_peak("fp32") < 1e14
    assert found.matmul_peak("bf16") == 0
    assert 0 < found.launch_s < 1e-3
    assert found.memory_bytes > 1 << 28


def test_a_damaged_or_foreign_file_is_no_ceiling(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert load_ceilings(path) is None
    for text in ("", "{", "[]", "{}", '{"schema": 1}', '{"schema": 99}'):
        path.write_text(text)
        assert load_ceilings(path) is None, text


def test_slugs() -> None:
    assert device_slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
    assert device_slug("AMD EPYC(TM) 7R13 @ 2.6GHz") == "amd-epyc-tm-7r13-2-6ghz"


def test_the_matmul_peak_is_a_rate() -> None:
    assert 1e8 < matmul_peak(CPU, torch.float32) < 1e14


def test_short_calls_are_timed_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is asked only now and then shows what each question costs."""
    now, calls = [0.0], [0]

    def work() -> None:
        calls[0] += 1
        now[0] += 0.001

    def synchronise(_: torch.device) -> None:
        now[0] += 0.002

    monkeypatch.setattr(harness, "synchronise", synchronise)
    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: now[0])
    assert median_seconds(work, CPU, 0.05) == pytest.approx(0.003)
    assert median_seconds(work, CPU, 0.05, at_least=0.03) == pytest.approx(0.001 + 0.002 / 10)
    assert median_seconds(work, CPU, 0.05, at_least=0.002) == pytest.approx(0.003), (
        "long enough alone"
    )
    seconds = iter([0.001, 0.001, 0.1])  # the first that is timed is disturbed

    def disturbed() -> None:
        now[0] += next(seconds, 0.001)

    assert median_seconds(disturbed, CPU, 0.5, at_least=0.03) == pytest.approx(0.001 + 0.002 / 10)
    calls[0] = 0
    median_seconds(work, CPU, 0.0, at_least=100.0)
    assert calls[0] == 2 + 1 + 3 * harness.MOST_IN_A_ROW
