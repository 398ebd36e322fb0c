"""Training on a build that is still going on: each recorded point fixes what is read after it."""

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from growing import ALL, building, publish, replaying, segments, small_shards
from run_tools import Killed, assert_same, die_at, train_until

from foundling.checkpoint.folders import step_of
from foundling.checkpoint.retention import latest
from foundling.cli import main
from foundling.config.data_manifest import Manifest
from foundling.config.errors import ConfigError, DataError, RunError
from foundling.config.load import dump_yaml
from foundling.config.run import RunConfig
from foundling.data.dataset import DataSet
from foundling.data.order import Order
from foundling.runtime.exits import Exit
from foundling.runtime.progress import PROGRESS, WAITING
from foundling.runtime.run_dir import RunDir, read_lines
from foundling.train import dataloader
from foundling.train.loop import train


@pytest.fixture(scope="session")
def shards(village: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_shards(village.tokenizer, tmp_path_factory.mktemp("shards") / "whole")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "growing"


@pytest.fixture
def config(tiny: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Forty steps of eight rows: five of the ten shards."""
    monkeypatch.setattr(dataloader, "POLL_INTERVAL_S", 0.02)
    return tiny.replace(
        train={"horizon": 40, "batch_size": 8},
        data={"sources": {str(folder): 1.0}, "follow": 0.5},
        eval={"every": 20},
        checkpoint={"every": 10},
    )


def check_each_once(run: RunDir, steps: int) -> None:
    """No unit is read twice within an epoch, and none is passed over before the epoch's end."""
    order = Order(1, segments(run))
    read = [order.locate(sample) for sample in range(order.sample_of(steps))]
    assert len(set(read)) == len(read)
    epochs = [unit.epoch for unit in read]
    assert epochs == sorted(epochs)


def test_a_run_that_follows_is_the_run_that_its_recorded_points_say(
    config: RunConfig,
    shards: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = RunDir(tmp_path / "killed")
    with building(shards, folder, run, every_s=0.3):
        for steps in (13, 24):
            with monkeypatch.context() as patch:
                die_at(patch, steps)
                with pytest.raises(Killed):
                    train(config, run)
        train(config, run)
    points = segments(run)
    assert len(points) > 2, "the build was too fast to be followed"
    check_each_once(run, 40)
    grown = [line for line in read_lines(run.events_path) if line["event"] == "data_grew"]
    assert {line["step"] for line in grown} == {segment.first_step for segment in points[1:]}
    shutil.rmtree(folder)
    publish(shards, folder, points[0].shards[str(folder)][1])
    monkeypatch.setattr(
        dataloader.DataLoader, "_extend_segments", replaying(points, shards, folder)
    )
    whole = RunDir(tmp_path / "whole")
    train(config, whole)
    assert segments(whole) == points
    assert_same(run, whole)


def test_a_killed_run_does_not_look_anew_at_what_it_had_recorded(
    config: RunConfig, shards: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took shard 1 up at some step, died before its next checkpoint, and the build went on."""
    publish(shards, folder, 1)
    run = RunDir(tmp_path / "run")
    looked = dataloader.DataLoader._extend_segments

    def one_more(self: dataloader.DataLoader, step: int) -> Any:
        publish(shards, folder, 2)
        return looked(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(dataloader.DataLoader, "_extend_segments", one_more)
        train_until(config, run, 9, patch)
    points = segments(run)
    assert [segment.shards[str(folder)] for segment in points] == [(0, 1), (1, 2)]
    publish(shards, folder, ALL)
    train(config, run)
    assert segments(run)[:2] == points
    assert segments(run)[2].shards[str(folder)][0] == 2
    check_each_once(run, 40)


def test_nothing_new_for_too_long_saves_and_stops(
    config: RunConfig, shards: Path, folder: Path, tmp_path: Path
) -> None:
    publish(shards, folder, 2)
    run = RunDir(tmp_path / "run")
    hasty = config.replace(data={"follow": 0.005})
    with pytest.raises(RunError, match=r"saved at step \d+: .*growing got no new shards"):
        train(hasty, run)
    newest = latest(run.checkpoints)
    assert newest is not None
    reached = step_of(newest)
    assert reached == len(read_lines(run.metrics_path)) > 10
    publish(shards, folder, ALL)
    train(config, run)
    assert [segment.first_step for segment in segments(run)] == [0, reached]
    check_each_once(run, 40)


def test_the_first_shards_are_waited_for(
    config: RunConfig, shards: Path, folder: Path, tmp_path: Path
) -> None:
    hasty = config.replace(data={"follow": 0.001})
    with pytest.raises(DataError, match="growing has no shards after"):
        train(hasty, RunDir(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    thread = threading.Timer(0.3, publish, (shards, folder, ALL))
    thread.start()
    started = time.monotonic()
    train(config, RunDir(tmp_path / "run"))
    thread.join()
    assert time.monotonic() - started > 0.2


def test_data_that_is_used_up_ends_the_run_or_is_read_again(
    config: RunConfig, shards: Path, folder: Path, tmp_path: Path
) -> None:
    publish(shards, folder, 4)
    longer = config.replace(train={"horizon": 100})
    hasty = longer.replace(data={"follow": 0.001})
    run = RunDir(tmp_path / "run")
    with pytest.raises(RunError, match="no new shards"):
        train(hasty, run)
    publish(shards, folder, ALL)
    last = DataSet(folder).units(64, "bestfit") // 8
    with pytest.raises(RunError, match=f"saved at step {last} of 100: the data is used up"):
        train(longer, run)
    assert segments(run)[-1].growing == ()
    repeat = longer.replace(data={"allow_repeat": 2.0})
    train(repeat, run)
    check_each_once(run, 100)
    line = read_lines(run.metrics_path)[-1]
    assert 1.2 < line["sources"][str(folder)]["epochs"] < 1.3


def test_what_cannot_be_followed_is_refused(
    config: RunConfig, shards: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(shards, folder, 2)
    run = RunDir(tmp_path / "run")
    plain = config.replace(data={"follow": 0.0})
    with pytest.raises(DataError, match=r"still being built.*data\.follow"):
        train(plain, run)
    with pytest.raises(ConfigError, match=r"train\.horizon 1 epochs counts data"):
        config.replace(train={"horizon": "1.0 epochs"})
    assert not run.path.exists()
    train_until(config, run, 12, monkeypatch)
    shutil.rmtree(folder)
    publish(shards, folder, 1)
    with pytest.raises(RunError, match=r"growing has 1 shards and .* has read from 2"):
        train(config, run)


def test_a_damaged_shard_that_came_late_is_not_trained_on(
    config: RunConfig, shards: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(shards, folder, 1)
    run = train_until(config, RunDir(tmp_path / "run"), 5, monkeypatch)
    publish(shards, folder, 2)
    path = folder / Manifest.load(folder).train[1].name
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(DataError, match="is damaged"):
        train(config, run)


def test_who_waits_for_the_first_shards_can_be_told_to_stop(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, as a phase that may take any time, and nothing is left of it."""
    phases: list[str] = []

    def has_begun(folder: Path) -> bool:
        if PROGRESS.phase == WAITING and not phases:
            phases.append(PROGRESS.phase)
            os.kill(os.getpid(), signal.SIGTERM)
        return False

    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    monkeypatch.setattr(dataloader, "_has_begun", has_begun)
    began = time.monotonic()
    words = ["train", str(tmp_path / "run.yaml"), "--run", str(tmp_path / "run")]
    code, sentence = main._run_and_report_exit(words)
    assert (code, "SIGTERM while waiting for" in sentence) == (Exit.REQUEUE, True), sentence
    assert phases == [WAITING]
    assert time.monotonic() - began < 25
    assert not (tmp_path / "run").exists()
