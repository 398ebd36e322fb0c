"""A planted NaN or spike is left out, and a run killed at any step replays to the same bits."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from little_run import FAULTS, GUARD, STEPS, Killed, LittleRun, Order

from foundling.checkpoint.folders import list_checkpoints, step_of
from foundling.checkpoint.manager import CheckpointManager
from foundling.checkpoint.manifest import load_meta
from foundling.checkpoint.reader import load_tensors, tensor_specs
from foundling.checkpoint.retention import latest
from foundling.runtime.exits import EndOfRun, Exit
from foundling.runtime.run_dir import cut_lines, read_lines
from foundling.runtime.run_reader import read_events
from foundling.train.faults import rollback
from foundling.train.faults.rollback import samples_of

pytestmark = pytest.mark.usefixtures("short_window")


def result(little: LittleRun) -> list[Any]:
    """Everything that must be the same: lines, record, ledger, weights and moments."""
    newest = latest(little.run.checkpoints)
    assert newest is not None
    assert step_of(newest) == STEPS
    meta = load_meta(newest)
    tensors = {
        name: torch.empty(s.shape, dtype=s.dtype) for name, s in tensor_specs(newest).items()
    }
    load_tensors(newest, tensors)
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    values = {name: tensor.tolist() for name, tensor in tensors.items()}
    lines = read_lines(little.run.metrics_path)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return [lines, meta["guard"], meta["ledger"], values]


def interventions(little: LittleRun) -> list[tuple[Any, ...]]:
    events = read_events(little.run).record
    assert [line["number"] for line in events] == list(range(len(events)))
    return [(e["what"], e["batch"], e["skipped"], e["back_to"]) for e in events]


WANTED: dict[str, list[tuple[Any, ...]]] = {
    "one NaN": [("nonfinite", 10, [10, 11], None)],
    "three in a row": [
        ("nonfinite", 10, [10, 11], None),
        ("nonfinite", 11, [11, 12], None),
        ("nonfinite", 12, [9, 13], 8),
    ],
    "a spike": [("spike", 14, [13, 15], 12)],
    "before the first save": [
        ("nonfinite", 1, [1, 2], None),
        ("nonfinite", 2, [2, 3], None),
        ("nonfinite", 3, [3, 4], None),
    ],
    "spikes that come again": [
        ("spike", 14, [13, 15], 12),
        ("spike", 15, [14, 16], 8),
        ("spike", 16, [15, 17], 4),
    ],
}


@pytest.mark.parametrize("name", WANTED)
def test_what_is_done_and_that_nothing_of_the_fault_sticks(name: str, tmp_path: Path) -> None:
    bad, clean = LittleRun(tmp_path / "bad", FAULTS[name]), LittleRun(tmp_path / "clean")
    bad.train()
    assert interventions(bad) == WANTED[name]
    # A run that knows from the start what to leave out.
    clean.folder.mkdir()
    known = read_events(bad.run).record
    clean.run.events_path.write_text("".join(json.dumps(line) + "\n" for line in known))
    clean.train()
    assert result(clean) == result(bad)
    assert not {line["batch"] for line in read_lines(bad.run.metrics_path)} & set(FAULTS[name])


@pytest.mark.parametrize("name", ["spikes that come again", "all of it"])
def test_killed_at_any_step_it_replays_to_the_same_bits(name: str, tmp_path: Path) -> None:
    whole = LittleRun(tmp_path / "whole", FAULTS[name])
    whole.train()
    for die_at in (9, 13, 24):
        killed = LittleRun(tmp_path / f"killed-{die_at}", FAULTS[name])
        with pytest.raises(Killed):
            killed.train(die_at)
        killed.train()
        assert result(killed) == result(whole)
        assert interventions(killed) == interventions(whole)


@pytest.mark.parametrize("place", ["log_intervention", "_go_back"])
def test_killed_between_decision_and_deed_it_does_the_same(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = LittleRun(tmp_path / "whole", FAULTS["spikes that come again"])
    killed = LittleRun(tmp_path / "killed", whole.faults)
    whole.train()
    real, calls = getattr(rollback, place), 0

    def deadly(*args: Any) -> None:
        nonlocal calls
        real(*args)
        calls += 1
        if calls == 2:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(rollback, place, deadly)
        with pytest.raises(Killed):
            killed.train()
    killed.train()
    assert result(killed) == result(whole)
    assert interventions(killed) == interventions(whole)


def test_killed_before_the_old_course_is_put_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = LittleRun(tmp_path / "whole", FAULTS["spikes that come again"])
    killed = LittleRun(tmp_path / "killed", whole.faults)
    whole.train()
    real = CheckpointManager.abandon_after

    def deadly(self: CheckpointManager, step: int) -> None:
        if step == 8:
            raise Killed
        real(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointManager, "abandon_after", deadly)
        with pytest.raises(Killed):
            killed.train()
    assert 12 in {step_of(path) for path in list_checkpoints(killed.run.checkpoints)}
    killed.train()
    assert result(killed) == result(whole)


def test_what_stays_bad_ends_the_run_and_leaves_its_checkpoints(tmp_path: Path) -> None:
    little = LittleRun(tmp_path / "run", dict.fromkeys(range(10, 99), math.nan))
    for _ in range(2):  # and so does another try
        with pytest.raises(EndOfRun, match="stepped in 6 times") as caught:
            little.train()
        assert caught.value.code == Exit.NONFINITE
    assert len(interventions(little)) == GUARD.limit
    newest = latest(little.run.checkpoints)
    assert newest is not None
    assert step_of(newest) == 8


def test_samples_are_named() -> None:
    assert samples_of(Order(), 5) == {
        "batch": 5, "first_sample": 15, "count": 3, "units": {"text": {"epoch 0": [15, 16, 17]}},
    }  # fmt: skip


def test_lines_are_cut_under_the_hand_that_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    with open(path, "a") as file:
        for step in range(1, 6):
            file.write(json.dumps({"step": step}) + "\n")
        file.write('{"step": 6')
        file.flush()
        cut_lines(path, 3)
        file.write(json.dumps({"step": 4, "again": True}) + "\n")
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3, 4]
    assert path.read_text().endswith('{"step": 4, "again": true}\n')
    cut_lines(tmp_path / "absent.jsonl", 3)
