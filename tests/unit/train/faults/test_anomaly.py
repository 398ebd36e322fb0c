"""The guard's decisions: what is refused, what is done about it, and when it gives up."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundling.config.errors import RunError
from foundling.config.run import GuardConfig
from foundling.runtime.exits import EndOfRun, Exit
from foundling.runtime.run_dir import RunDir, read_lines
from foundling.train.faults import anomaly
from foundling.train.faults.anomaly import (
    AnomalyGuard,
    Intervention,
    RefusedStep,
    RefusedStepError,
    log_intervention,
    open_guard,
    read_interventions,
)

CONFIG = GuardConfig(spike_loss=8, spike_norm=8, nonfinite=3, limit=4)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tests have few steps."""
    monkeypatch.setattr(anomaly, "WINDOW", 16)
    monkeypatch.setattr(anomaly, "LIMIT_STEPS", 50)


def steady(step: int) -> tuple[float, float]:
    return 3.0 + 0.01 * (step * 7 % 5), 1.0 + 0.02 * (step * 3 % 7)


def fed(guard: AnomalyGuard, steps: int) -> AnomalyGuard:
    for step in range(steps):
        guard.check(step, *steady(step))
    return guard


def refusal(guard: AnomalyGuard, step: int, loss: float, norm: float) -> RefusedStep:
    with pytest.raises(RefusedStepError) as caught:
        guard.check(step, loss, norm)
    return caught.value.refused


@pytest.mark.parametrize(
    ("loss", "norm"),
    [(math.nan, 1.0), (3.0, math.nan), (math.inf, 1.0), (3.0, math.inf), (-math.inf, 1.0)],
)
def test_what_is_not_finite_is_refused_from_the_first_step(loss: float, norm: float) -> None:
    guard = AnomalyGuard(CONFIG)
    refused = refusal(guard, 0, loss, norm)
    assert (refused.what, refused.step, refused.batch) == ("nonfinite", 0, 0)
    assert len(guard.history) == 0


@pytest.mark.parametrize(("loss", "norm"), [(9.0, 1.0), (3.0, 40.0)])
def test_a_spike_is_refused_and_does_not_enter_the_history(loss: float, norm: float) -> None:
    guard = fed(AnomalyGuard(CONFIG), 20)
    before = guard.history.to_json()
    assert refusal(guard, 20, loss, norm).what == "spike"
    assert guard.history.to_json() == before


def test_half_a_window_is_needed_for_a_spike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anomaly, "WINDOW", 128)
    fed(AnomalyGuard(CONFIG), 20).check(20, 9.0, 40.0)
    with pytest.raises(RefusedStepError):
        fed(AnomalyGuard(CONFIG), 64).check(64, 9.0, 40.0)


@pytest.mark.parametrize(
    ("config", "loss", "norm"),
    [
        (CONFIG.replace(spike_loss=0), 9.0, 1.0),
        (CONFIG.replace(spike_norm=0), 3.0, 40.0),
        (CONFIG, 0.5, 0.01),  # downwards is no spike
    ],
)
def test_what_is_no_spike_passes(config: GuardConfig, loss: float, norm: float) -> None:
    fed(AnomalyGuard(config), 20).check(20, loss, norm)


def test_other_data_is_not_measured_by_the_old() -> None:
    guard = AnomalyGuard(CONFIG)
    guard.mixture_digest = lambda batch: "long" if batch >= 20 else "short"
    fed(guard, 20).check(20, 9.0, 40.0)
    assert len(guard.history) == 1


def test_one_bad_batch_is_left_out_and_three_in_a_row_go_back() -> None:
    guard = fed(AnomalyGuard(CONFIG), 20)
    for number in range(2):
        done = guard.decide(refusal(guard, 20, math.nan, 1.0), target=15)
        assert (done.skipped, done.back_to) == ((20 + number, 21 + number), None)
        guard.record_intervention(done)
    assert guard.skips.batch_of(20) == 22
    refused = refusal(guard, 20, math.nan, 1.0)
    assert guard.needs_rollback(refused)
    done = guard.decide(refused, target=15)
    assert done.back_to == 15
    assert done.skipped == (19, 23)  # with the batch whose update may have done the harm


def test_bad_batches_with_good_steps_between_them_do_not_add_up() -> None:
    guard = fed(AnomalyGuard(CONFIG), 20)
    for step in (20, 21):
        guard.record_intervention(guard.decide(refusal(guard, step, math.nan, 1.0), target=15))
        guard.check(step, *steady(step))
    refused = refusal(guard, 22, math.nan, 1.0)
    assert not guard.needs_rollback(refused)


def test_a_spike_goes_back_and_leaves_out_its_batch_and_the_one_before() -> None:
    guard = fed(AnomalyGuard(CONFIG), 20)
    done = guard.decide(refusal(guard, 20, 9.0, 1.0), target=15)
    assert (done.what, done.back_to, done.skipped) == ("spike", 15, (19, 21))


def test_nothing_before_the_checkpoint_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anomaly, "SKIP_BEFORE", 9)
    guard = fed(AnomalyGuard(CONFIG), 20)
    done = guard.decide(refusal(guard, 20, 9.0, 1.0), target=18)
    assert done.skipped == (18, 21)


def test_without_a_checkpoint_the_batch_is_only_left_out() -> None:
    guard = fed(AnomalyGuard(CONFIG), 20)
    done = guard.decide(refusal(guard, 20, 9.0, 1.0), target=None)
    assert (done.back_to, done.skipped) == (None, (20, 21))


def test_too_much_ends_the_run_with_its_own_code() -> None:
    guard = fed(AnomalyGuard(CONFIG), 20)
    for _ in range(CONFIG.limit):
        guard.record_intervention(guard.decide(refusal(guard, 20, math.nan, 1.0), target=None))
    with pytest.raises(EndOfRun, match=r"4 times.*guard\.limit") as caught:
        guard.decide(refusal(guard, 20, math.nan, 1.0), target=None)
    assert caught.value.code == Exit.NONFINITE
    far = refusal(guard, 20 + anomaly.LIMIT_STEPS, math.nan, 1.0)
    assert guard.decide(far, target=None).back_to is None  # long ago is forgiven


def test_a_checkpoint_that_did_not_help_is_known() -> None:
    guard = fed(AnomalyGuard(CONFIG), 20)
    guard.record_intervention(guard.decide(refusal(guard, 20, 9.0, 1.0), target=15))
    again = refusal(guard, 20, 9.0, 1.0)
    assert guard.rollback_steps_that_failed(again) == {15}
    later = refusal(guard, 29, 9.0, 1.0)
    assert guard.rollback_steps_that_failed(later) == set()


def replayed(faults: set[int], kill_at: list[int], checkpoint_every: int = 5) -> list[Any]:
    """A run of 40 steps over batches of which some have no finite loss, killed before some of its
    steps: every kill goes back to the last checkpoint, and only the events remember."""
    guard, record, saved = AnomalyGuard(CONFIG), [], {0: AnomalyGuard(CONFIG).to_json()}
    log: dict[int, int] = {}
    kills, step = list(kill_at), 0
    while step < 40:
        if kills and step == kills[0]:
            kills.pop(0)
            step = max(saved)
            guard = open_guard(CONFIG, [one.to_json() for one in record], {"guard": saved[step]})
        batch = guard.skips.batch_of(step)
        try:
            guard.check(step, math.nan if batch in faults else steady(step)[0], steady(step)[1])
        except RefusedStepError as refused:
            needs_rollback = guard.needs_rollback(refused.refused)
            done = guard.decide(refused.refused, max(saved) if needs_rollback else None)
            record.append(done)
            guard.record_intervention(done)
            if done.back_to is not None:
                step = done.back_to
                guard.restore({"guard": saved[step]})
            continue
        log[step] = batch
        step += 1
        if step % checkpoint_every == 0:
            saved[step] = guard.to_json()
    return [sorted(log.items()), guard.skips.to_json(), [i.to_json() for i in record]]


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(3, 38), max_size=3), st.lists(st.integers(1, 39), max_size=5))
def test_killed_anywhere_the_run_decides_the_same(faults: set[int], kills: list[int]) -> None:
    assert replayed(faults, sorted(kills)) == replayed(faults, [])


@pytest.mark.parametrize("kills", [[7], [8, 8, 8], [5, 9, 12]])
def test_three_in_a_row_go_back_although_a_kill_comes_between(kills: list[int]) -> None:
    whole = replayed({7, 8, 9}, [])
    assert [one["back_to"] for one in whole[2]] == [None, None, 5]
    assert replayed({7, 8, 9}, kills) == whole


def intervention(batch: int = 4) -> Intervention:
    return Intervention(
        what="spike", step=4, batch=batch, loss="9.5", grad_norm="nan",
        skipped=(batch, batch + 1), back_to=2,
    )  # fmt: skip


def test_the_record_is_the_files_or_the_checkpoints(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    first, second = intervention(4), intervention(7)
    meta = {"guard": AnomalyGuard(CONFIG, [first]).to_json()}
    assert read_interventions(run, None) == []
    assert read_interventions(run, meta) == [first.to_json()]
    log_intervention(run, 0, first, [])
    log_intervention(run, 1, second, [])
    assert read_interventions(run, meta) == [first.to_json(), second.to_json()]
    again = open_guard(CONFIG, json.loads(json.dumps(read_interventions(run, meta))), meta)
    assert again.interventions == (first, second)
    assert again.skips.to_json() == [[4, 5], [7, 8]]


@pytest.mark.parametrize(
    ("number", "was", "written"),
    [
        (0, '"batch_left_out"', '"batch_left_'),  # a torn line, with others after it
        (1, '"skipped"', '"skippe'),
        (0, '"batch": 4', '"batches": 4'),
        (0, '"skipped": [4, 5]', '"skipped": 4'),
        (1, '"number": 1', '"number": 0'),
    ],
)
def test_a_damaged_record_is_refused(number: int, was: str, written: str, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for place in range(3):
        log_intervention(run, place, replace(intervention(), back_to=None), [])
    lines = run.events_path.read_text().splitlines(keepends=True)
    assert was in lines[number]
    lines[number] = lines[number].replace(was, written)
    run.events_path.write_text("".join(lines))
    with pytest.raises(RunError, match="lacks what the guard has done"):
        read_interventions(run, None)


def test_an_event_that_a_kill_has_torn_was_not_acted_on(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    first, second = intervention(4), intervention(7)
    log_intervention(run, 0, first, [])
    log_intervention(run, 1, second, [])
    run.close()
    text = run.events_path.read_text()
    run.events_path.write_text(text[:-20])
    assert read_interventions(run, None) == [first.to_json()]
    log_intervention(run, 1, second, [])  # decided again
    assert read_interventions(run, None) == [first.to_json(), second.to_json()]


def test_a_record_of_another_run_is_refused(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    log_intervention(run, 0, intervention(7), [])
    with pytest.raises(RunError, match="or has it from another run"):
        read_interventions(run, {"guard": AnomalyGuard(CONFIG, [intervention(4)]).to_json()})


def test_a_run_that_has_lost_its_events_is_refused(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_info({"status": "running"})
    meta = {"guard": AnomalyGuard(CONFIG, [intervention(4)]).to_json()}
    with pytest.raises(RunError, match="lacks what the guard has done"):
        read_interventions(run, meta)


def test_an_intervention_names_its_rows(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    log_intervention(run, 0, intervention(4), [{"batch": 4}])
    (event,) = read_lines(run.events_path)
    assert (event["event"], event["back_to"]) == ("rolled_back", 2)
    assert event["samples"] == [{"batch": 4}]
