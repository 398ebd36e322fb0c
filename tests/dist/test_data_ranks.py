"""Phases and followed builds with several processes: every rank reads by the same segments."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from growing import building, publish, replaying, segments, small_shards
from layout_ranks import train_run
from worlds import World

from foundling.config.run import RunConfig
from foundling.config.data import PhaseConfig
from foundling.runtime.run_dir import RunDir
from foundling.runtime.run_dir import read_lines
from foundling.train import dataloader
from foundling.train.loop import train

EQUAL = ("step", "tokens", "targets", "sources", "seq_len")


def assert_alike(one: Path, many: Path) -> None:
    left, right = (read_lines(RunDir(run).metrics_path) for run in (one, many))
    for name in EQUAL:
        assert [line[name] for line in left] == [line[name] for line in right]
    for a, b in zip(left, right, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)


def test_phases_on_two_ranks(tiny: RunConfig, opened: dict[int, World], tmp_path: Path) -> None:
    # Fourteen short rows, then seven long ones, which do not divide by two.
    config = tiny.replace(train={"horizon": 4, "global_batch_tokens": 14 * 64}, data={"phases": (PhaseConfig(at=0.5, seq_len=128),)})
    train(config, RunDir(tmp_path / "one"))
    opened[2].run(train_run, config, tmp_path / "many")
    assert_alike(tmp_path / "one", tmp_path / "many")


def test_a_build_followed_by_two_ranks(
    tiny: RunConfig,
    village: Any,
    opened: dict[int, World],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = small_shards(village.tokenizer, tmp_path / "whole")
    folder = tmp_path / "growing"
    config = tiny.replace(train={"horizon": 24, "batch_size": 4, "global_batch_tokens": 9 * 64}, data={"sources": {str(folder): 1.0}, "follow": 60.0}, eval={"every": 100}, checkpoint={"every": 100})
    with building(whole, folder, RunDir(tmp_path / "many"), every_s=0.5):
        opened[2].run(train_run, config, tmp_path / "many")
    points = segments(RunDir(tmp_path / "many"))
    assert len(points) > 1, "the build was too fast to be followed"
    for shard in (folder / "train").glob("*.arrow"):
        shard.unlink()
    publish(whole, folder, points[0].shards[str(folder)][1])
    monkeypatch.setattr(dataloader.DataLoader, "_extend_segments", replaying(points, whole, folder))
    train(config, RunDir(tmp_path / "one"))
    assert segments(RunDir(tmp_path / "one")) == points
    assert_alike(tmp_path / "one", tmp_path / "many")
