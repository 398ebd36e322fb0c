"""Phases: at a share of the steps other rows, another mixture; and the run is still one run."""

from pathlib import Path
from typing import Any

import pytest
from run_tools import assert_same, train_until

from foundling.checkpoint.bundle import load_bundle
from foundling.checkpoint.manifest import load_meta
from foundling.checkpoint.retention import latest, scores
from foundling.config.data import PhaseConfig
from foundling.config.errors import ConfigError
from foundling.config.run import RunConfig
from foundling.plan.params import flops_per_token
from foundling.runtime.run_dir import RunDir, read_lines
from foundling.runtime.run_reader import read_events, read_ledger
from foundling.train.loop import train


def with_phases(config: RunConfig, *phases: PhaseConfig, **data: Any) -> RunConfig:
    return config.replace(data={"phases": phases, **data})


@pytest.fixture
def longer(tiny: RunConfig) -> RunConfig:
    """Rows of 64 for five steps of eight, then rows of 128."""
    return with_phases(tiny, PhaseConfig(at=0.625, seq_len=128))


@pytest.fixture
def whole(longer: RunConfig, tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "whole")
    train(longer, run)
    return run


def test_a_phase_changes_the_rows_and_nothing_else(whole: RunDir, longer: RunConfig) -> None:
    lines, info = read_lines(whole.metrics_path), whole.read_info()
    assert [line["seq_len"] for line in lines] == [64] * 5 + [128] * 3
    assert [line["positions"] for line in lines] == [256] * 8
    units = [sum(s["units"] for s in line["sources"].values()) for line in ledger(whole)]
    assert units == [4] * 5 + [2] * 3
    model = longer.model.replace(vocab_size=400)
    for line in lines[4], lines[5]:
        flops = line["positions"] * flops_per_token(model, line["seq_len"])
        share = flops / line["step_s"] / info["matmul_flops"]
        assert line["matmul_share"] == pytest.approx(share, rel=1e-2)
    tokens = info["plan"]["predicted"]["tokens"]
    assert lines[-1]["total_tokens"] == pytest.approx(tokens, rel=0.05)
    phases = info["plan"]["forecast"]["horizon"]["phases"]
    assert [(p["first_step"], p["steps"], p["rows_per_step"]) for p in phases] == [
        (0, 5, 4),
        (5, 3, 2),
    ]


def ledger(run: RunDir) -> list[dict[str, Any]]:
    return read_lines(run.metrics_path)


@pytest.mark.parametrize("steps", [4, 5, 6, 7])
def test_a_run_killed_around_a_phase_goes_on_to_the_same_bits(
    steps: int, longer: RunConfig, whole: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train_until(longer, RunDir(tmp_path / "killed"), steps, monkeypatch)
    train(longer, run)
    assert_same(run, whole)


def test_evaluation_and_use_follow_the_longest_rows_so_far(
    longer: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foundling.train import evaluation

    windows = []
    real = evaluation.held_out_bpb

    def watching(*args: Any, window: int, **kwargs: Any) -> Any:
        windows.append(window)
        return real(*args, window=window, **kwargs)

    monkeypatch.setattr(evaluation, "held_out_bpb", watching)
    run = RunDir(tmp_path / "run")
    train(longer.replace(checkpoint={"every": 4, "keep": 9}), run)
    assert windows == [64, 128, 128], "the last of them read everything"
    measures = [line["measure"] for line in read_events(run).measured["evaluated"]]
    assert len(set(measures)) == 2, "a longer context is another measure"
    assert list(scores(run.checkpoints)) == [8], "which the older score says nothing of"
    assert load_bundle(f"{run.path}@4").context == 64
    assert load_bundle(f"{run.path}@8").context == 128


def test_a_phase_may_change_the_mixture(tiny: RunConfig, second: Path, tmp_path: Path) -> None:
    text, other = next(iter(tiny.data.sources)), str(second)
    config = with_phases(tiny, PhaseConfig(at=0.5, sources={text: 1.0, other: 3.0}))
    run = RunDir(tmp_path / "run")
    train(config, run)
    eaten = ledger(run)
    assert [set(line["sources"]) for line in eaten] == [{text}] * 4 + [{text, other}] * 4
    units = {name: s["units"] for name, s in totals(run).items()}
    assert units == {text: 16 + 4, other: 12}
    newest = latest(run.checkpoints)
    assert newest is not None
    assert [s["first_step"] for s in load_meta(newest)["segments"]] == [0, 4]


def totals(run: RunDir) -> dict[str, dict[str, float]]:
    return read_ledger(run)[0]


def test_a_phase_that_cannot_be_is_refused_before_anything_is_written(
    tiny: RunConfig, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    for phase, named in [
        (PhaseConfig(at=0.01, seq_len=32), "step 0 of 8"),
        (PhaseConfig(at=8, seq_len=32), "step 8 of 8"),
        (PhaseConfig(at=0.5, seq_len=96), "not a multiple of .* 96"),
    ]:
        with pytest.raises(ConfigError, match=named):
            train(with_phases(tiny, phase), run)
    assert not run.path.exists()


def test_too_little_data_over_all_phases_is_refused(tiny: RunConfig, tmp_path: Path) -> None:
    """Either phase alone would have enough."""
    half = tiny.replace(train={"horizon": 200})
    with pytest.raises(ConfigError, match=r"read 1\.\d+ times .* data\.allow_repeat"):
        train(with_phases(half, PhaseConfig(at=0.5, seq_len=128)), RunDir(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("packing", ["concat", "pad", "bucket"])
def test_a_phase_may_change_the_packing(
    packing: Any, tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_phases(tiny, PhaseConfig(at=0.5, packing=packing))
    if packing == "bucket":
        phase = PhaseConfig(at=0.5, packing="bucket", seq_len=256)
        config = with_phases(tiny, phase, buckets=(64, 128), bucket_tokens=256)
    runs = [RunDir(tmp_path / name) for name in ("whole", "killed")]
    train(config, runs[0])
    train(config, train_until(config, runs[1], 6, monkeypatch))
    assert_same(*runs)
    lines, eaten = read_lines(runs[0].metrics_path), ledger(runs[0])
    assert {line["positions"] for line in lines[:4]} == {256}
    units = [sum(s["units"] for s in line["sources"].values()) for line in eaten]
    assert units == [4] * 4 + [1 if packing == "bucket" else 4] * 4
    for line, read in zip(lines, eaten, strict=True):
        assert line["tokens"] == sum(s["tokens"] for s in read["sources"].values())
        assert 0 < line["tokens"] <= line["positions"] <= 256
    if packing == "bucket":  # each step of one of the lengths, and not of one alone
        lengths = {line["seq_len"] for line in lines[4:]}
        assert len(lengths) > 1
        assert lengths <= {64, 128, 256}
