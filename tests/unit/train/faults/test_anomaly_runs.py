"""Runs with a planted NaN or spike: nothing bad is learned, everything is accounted for, and
killed anywhere they replay to the same bits."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_tools import Killed, assert_same, columns, die_at, weights

from foundling.checkpoint.folders import step_of
from foundling.checkpoint.manifest import load_meta
from foundling.checkpoint.retention import latest
from foundling.config.run import GuardConfig, RunConfig
from foundling.data.batch import Batch
from foundling.data.batch_reader import BatchReader
from foundling.runtime.exits import EndOfRun, Exit
from foundling.runtime.lock import RunLock
from foundling.runtime.run_dir import RunDir, read_lines
from foundling.runtime.run_reader import read_events
from foundling.train import step
from foundling.train.faults.anomaly import read_interventions
from foundling.train.loop import train

pytestmark = pytest.mark.usefixtures("short_window")

GUARD = GuardConfig(nonfinite=3, limit=6, spike_loss=8, spike_norm=8)


@pytest.fixture
def config(tiny: RunConfig) -> RunConfig:
    """Twenty steps, saved every three."""
    return tiny.replace(
        train={"horizon": 20},
        eval={"every": 7},
        checkpoint={"every": 3},
        log={"tensorboard": True, "every": 99},
        guard=GUARD,
    )


def plant(patch: pytest.MonkeyPatch, faults: dict[int, float]) -> None:
    """Batches whose loss and gradients come out multiplied by some factor."""
    real_step, real_sum = BatchReader.step, step._accumulate

    def marked(self: BatchReader, number: int) -> list[Batch]:
        batches = real_step(self, number)
        if number in faults:
            batches = [replace(one, units={**one.units, "planted": number}) for one in batches]
        return batches

    def multiplied(state: Any, batches: list[Batch], *rest: Any) -> torch.Tensor:
        total = real_sum(state, batches, *rest)
        number = batches[0].units.get("planted")
        if number is not None:
            for _, param in state.params():
                param.grad *= faults[number]
            total = total * faults[number]
        return total

    patch.setattr(BatchReader, "step", marked)
    patch.setattr(step, "_accumulate", multiplied)


def interventions(run: RunDir) -> list[dict[str, Any]]:
    return read_interventions(run, None)


def events(run: RunDir) -> list[Mapping[str, Any]]:
    return read_events(run).record


CASES: dict[str, tuple[dict[int, float], list[tuple[list[int], int | None]]]] = {
    "three in a row": (
        {10: math.nan, 11: math.inf, 12: math.nan},
        [([10, 11], None), ([11, 12], None), ([9, 13], 9)],
    ),
    "a NaN and a spike": ({7: math.nan, 14: 60.0}, [([7, 8], None), ([13, 15], 12)]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_left_out_as_if_it_had_never_been(
    name: str, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults, wanted = CASES[name]
    run, clean = RunDir(tmp_path / "run"), RunDir(tmp_path / "clean")
    with monkeypatch.context() as patch:
        plant(patch, faults)
        train(config, run)
    done = interventions(run)
    assert [(one["skipped"], one["back_to"]) for one in done] == wanted
    # A run that knows from the start what to leave out: nothing of the fault may have stuck.
    with RunLock(clean.path):  # as a start leaves it that was cut off before run.json
        pass
    clean.events_path.write_text("".join(json.dumps(line) + "\n" for line in events(run)))
    train(config, clean)
    assert_same(run, clean)
    assert [line["step"] for line in read_events(run).measured["evaluated"]] == [7, 14, 20]
    assert all(torch.isfinite(tensor).all() for tensor in weights(run).values())


@pytest.mark.parametrize("name", CASES)
def test_killed_anywhere_it_replays_to_the_same_bits(
    name: str, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [RunDir(tmp_path / name) for name in ("whole", "killed")]
    plant(monkeypatch, CASES[name][0])
    train(config, runs[0])
    for steps in (9, 13, 16):
        with monkeypatch.context() as patch:
            die_at(patch, steps)
            with pytest.raises(Killed):
                train(config, runs[1])
    train(config, runs[1])
    assert_same(*runs)
    assert interventions(runs[0]) == interventions(runs[1])
    assert [line["number"] for line in events(runs[1])] == list(range(len(CASES[name][1])))


def test_samples_and_ledger_tell_what_was_left_out(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "run")
    plant(monkeypatch, {10: math.nan})
    train(config, run)
    (told,) = events(run)
    (sample,) = told["samples"]
    assert (sample["batch"], sample["first_sample"], sample["count"]) == (10, 40, 4)
    (units,) = sample["units"].values()
    assert len(units["epoch 0"]) == 4
    lines = read_lines(run.metrics_path)
    left = {line["step"]: line["skipped"] for line in lines if "skipped" in line}
    (source,) = lines[0]["sources"]
    assert left == {11: {source: 4}}
    newest = latest(run.checkpoints)
    assert newest is not None
    meta = load_meta(newest)
    assert meta["guard"]["skips"] == [[10, 11]]
    assert meta["ledger"][source]["units"] == 20 * 4  # read, and not what was left out


def test_what_stays_bad_ends_the_run_with_its_checkpoints(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "run")
    with monkeypatch.context() as patch:
        plant(patch, dict.fromkeys(range(10, 99), math.nan))
        for _ in range(2):  # a restart comes to the same end
            with pytest.raises(
                EndOfRun, match=r"stepped in 6 times; what was saved is intact"
            ) as caught:
                train(config, run)
            assert caught.value.code == Exit.NONFINITE
    newest = latest(run.checkpoints)
    assert newest is not None
    assert step_of(newest) == 9
    assert len(interventions(run)) == GUARD.limit
    # With the data repaired and a little more patience the run goes on from there.
    train(config.replace(guard=GUARD.replace(limit=7)), run)
    assert run.read_info()["status"] == "finished"


def test_a_calm_run_is_not_touched(config: RunConfig, tmp_path: Path) -> None:
    guarded, bare = RunDir(tmp_path / "guarded"), RunDir(tmp_path / "bare")
    train(config, guarded)
    off = GuardConfig(spike_loss=0, spike_norm=0, hash_every=0, hang_s=0)
    train(config.replace(guard=off), bare)
    assert columns(guarded) == columns(bare)
    assert interventions(guarded) == []


def test_killed_before_anything_was_saved_it_begins_again(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches were left out already, and no checkpoint knows of it."""
    runs = [RunDir(tmp_path / name) for name in ("whole", "killed")]
    plant(monkeypatch, {0: math.nan, 1: math.inf})
    train(config, runs[0])
    with monkeypatch.context() as patch:
        die_at(patch, 2)
        with pytest.raises(Killed):
            train(config, runs[1])
    assert latest(runs[1].checkpoints) is None
    train(config, runs[1])
    assert_same(*runs)


def test_a_run_that_goes_back_behind_its_resume_tells_on(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line of the step that it was taken up at is told again."""
    run = RunDir(tmp_path / "run")
    config = config.replace(log={"every": 1})
    plant(monkeypatch, {13: 60.0, 15: 60.0})
    with monkeypatch.context() as patch:
        die_at(patch, 13)
        with pytest.raises(Killed):
            train(config, run)
    train(config, run)
    assert [one["back_to"] for one in interventions(run)] == [12, 9]
    assert len(read_lines(run.metrics_path)) == 20
