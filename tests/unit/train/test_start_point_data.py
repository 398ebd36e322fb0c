"""Other data at a resume: a segment from that step on, and what was read stays accounted for."""

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_tools import assert_same, train_until

from foundling.config.data import PhaseConfig
from foundling.config.errors import ConfigError, RunError
from foundling.config.run import EvalConfig, RunConfig
from foundling.data.order import Order
from foundling.report.runs import describe_run, show_run
from foundling.runtime.lock import RunLock
from foundling.runtime.run_dir import RunDir, read_lines
from foundling.runtime.run_reader import read_ledger
from foundling.train.dataloader import read_data_order
from foundling.train.faults.anomaly import Intervention, log_intervention
from foundling.train.loop import train

Change = Callable[[RunConfig], RunConfig]
SAVED = 3
"""The checkpoint that a run killed in its fifth step goes on from."""


@pytest.fixture
def tiny(tiny: RunConfig) -> RunConfig:
    """Without evaluations, before which a run would be saved too."""
    return tiny.replace(eval=EvalConfig(every=0))


def data(config: RunConfig, **fields: Any) -> RunConfig:
    return config.replace(data=fields)


def resumed(
    before: RunConfig, after: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> RunDir:
    """A run that is killed in its fifth step and goes on with another config."""
    run = train_until(before, RunDir(folder), 5, monkeypatch)
    train(after, run)
    return run


def order_of(run: RunDir) -> Order:
    record = read_data_order(run, None)
    assert record is not None
    return Order(1, record.segments)


def check_counts(run: RunDir, steps: int = 8) -> None:
    """Ledger, order and metrics tell one story, by brute force; and nothing was read twice."""
    order = order_of(run)
    samples = order.sample_of(steps)
    read = [order.locate(sample) for sample in range(samples)]
    assert len(set(read)) == samples
    eaten = read_ledger(run)[0]
    assert {name: counts["units"] for name, counts in eaten.items()} == Counter(
        unit.source for unit in read
    )
    lines = read_lines(run.metrics_path)
    assert sum(c["tokens"] for c in eaten.values()) == sum(line["tokens"] for line in lines)
    assert run.read_info()["status"] == "finished"


def changed(run: RunDir) -> dict[str, Any]:
    [event] = [line for line in read_lines(run.events_path) if line["event"] == "data_changed"]
    assert event["step"] == SAVED
    return event


def test_a_source_is_added(
    tiny: RunConfig, second: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [text] = tiny.data.sources
    after = data(tiny, sources={text: 1.0, str(second): 1.0})
    run = resumed(tiny, after, tmp_path / "run", monkeypatch)
    check_counts(run)
    assert [s.first_step for s in order_of(run).segments] == [0, SAVED]
    assert list(changed(run)["changes"]) == ["data.sources"]
    assert changed(run)["left_unread"] == []
    eaten = read_ledger(run)[0]
    assert {name: counts["units"] for name, counts in eaten.items()} == {
        text: 4 * SAVED + 10,
        str(second): 10,
    }
    # The old source goes on where it was: its epoch is not begun again.
    assert {order_of(run).locate(sample).epoch for sample in range(32)} == {0}


def test_a_source_is_removed_even_from_the_disk(
    tiny: RunConfig, second: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [text] = tiny.data.sources
    copy = tmp_path / "gone"
    shutil.copytree(second, copy)
    before = data(tiny, sources={text: 1.0, str(copy): 1.0})
    run = train_until(before, RunDir(tmp_path / "run"), 5, monkeypatch)
    shutil.rmtree(copy)
    train(tiny, run)
    check_counts(run)
    eaten = read_ledger(run)[0]
    assert eaten[str(copy)]["units"] == 2 * SAVED


def test_a_change_after_batches_that_were_left_out_is_told_by_its_step(
    tiny: RunConfig, second: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "run")
    with RunLock(run.path):  # as a start leaves it that was cut off before run.json
        pass
    left_out = Intervention(
        what="nonfinite", step=1, batch=1, loss="nan", grad_norm="nan", skipped=(1, 2)
    )
    log_intervention(run, 0, left_out, [])
    train_until(tiny, run, 5, monkeypatch)
    [text] = tiny.data.sources
    train(data(tiny, sources={text: 1.0, str(second): 1.0}), run)
    assert list(changed(run)["from_step"]) == [str(SAVED)]
    assert [s.first_step for s in order_of(run).segments] == [0, SAVED + 1]


def test_weights_change(
    tiny: RunConfig, second: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [text] = tiny.data.sources
    before = data(tiny, sources={text: 1.0, str(second): 1.0})
    after = data(tiny, sources={text: 1.0, str(second): 3.0}, weights_by="tokens")
    run = resumed(before, after, tmp_path / "run", monkeypatch)
    check_counts(run)
    assert set(changed(run)["changes"]) == {"data.sources", "data.weights_by"}
    saved, ended = read_ledger(run, SAVED)[0], read_ledger(run)[0]
    tokens = {n: c["tokens"] - saved.get(n, {}).get("tokens", 0) for n, c in ended.items()}
    assert tokens[str(second)] / sum(tokens.values()) == pytest.approx(0.75, abs=0.06)


CUTS: dict[str, Change] = {
    "seq_len": lambda c: c.replace(
        train={"seq_len": 128, "batch_size": 2, "global_batch_tokens": 256}
    ),
    "packing": lambda c: data(c, packing="concat"),
}


@pytest.mark.parametrize("cut", CUTS)
def test_another_cut_begins_the_next_epoch_and_says_what_is_left(
    cut: str, tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = resumed(tiny, CUTS[cut](tiny), tmp_path / "run", monkeypatch)
    check_counts(run)
    [unread] = changed(run)["left_unread"]
    first = order_of(run).segments[0]
    [text] = tiny.data.sources
    assert unread["units"] == first.units[text] - 4 * SAVED
    told = "\n".join(describe_run(show_run(run)))
    assert (
        f"from step 3 on: changed {'train.seq_len' if cut == 'seq_len' else 'data.packing'}" in told
    )
    assert f"{unread['units']:,} of {first.units[text]:,} units of {text}'s epoch 0" in told
    assert {order_of(run).locate(s).epoch for s in range(4 * SAVED, 4 * SAVED + 5)} == {1}
    lines = read_lines(run.metrics_path)
    assert [line["positions"] for line in lines] == [256] * 8


def test_a_phase_is_put_off(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = data(tiny, phases=(PhaseConfig(at=0.625, seq_len=128),))
    after = data(tiny, phases=(PhaseConfig(at=0.75, seq_len=128),))
    run = resumed(before, after, tmp_path / "run", monkeypatch)
    check_counts(run)
    assert [s.first_step for s in order_of(run).segments] == [0, 6]


@pytest.mark.parametrize("again", [4, 5])
def test_a_change_survives_another_kill_before_the_next_checkpoint(
    again: int, tiny: RunConfig, second: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [text] = tiny.data.sources
    after = data(tiny, sources={text: 1.0, str(second): 2.0})
    once = resumed(tiny, after, tmp_path / "once", monkeypatch)
    twice = train_until(tiny, RunDir(tmp_path / "twice"), 5, monkeypatch)
    train(after, train_until(after, twice, again, monkeypatch))
    assert_same(once, twice)
    assert order_of(once).segments == order_of(twice).segments


def test_a_source_that_changed_under_its_name_is_refused(
    tiny: RunConfig, second: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [text] = tiny.data.sources
    copy = tmp_path / "mine"
    shutil.copytree(text, copy)
    config = data(tiny, sources={str(copy): 1.0})
    run = train_until(config, RunDir(tmp_path / "run"), 5, monkeypatch)
    shutil.rmtree(copy)
    shutil.copytree(second, copy)
    papers = [path.read_text() for path in (run.config_path, run.info_path, run.events_path)]
    for now in (config, data(config, sources={str(copy): 1.0, text: 1.0})):
        with pytest.raises(RunError, match=r"mine holds other data than .* has read"):
            train(now, run)
    greedy = data(config, sources={str(second): 1.0}, allow_repeat=0.001)
    with pytest.raises(ConfigError, match=r"data\.allow_repeat"):
        train(greedy, run)
    # Nothing of what was refused was written down.
    assert papers == [
        path.read_text() for path in (run.config_path, run.info_path, run.events_path)
    ]


def test_a_source_under_another_name_is_refused(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [text] = tiny.data.sources
    copy = tmp_path / "moved"
    shutil.copytree(text, copy)
    run = train_until(tiny, RunDir(tmp_path / "run"), 5, monkeypatch)
    with pytest.raises(RunError, match=r"moved is the data set that .* has read as"):
        train(data(tiny, sources={str(copy): 1.0}), run)


def test_a_record_of_another_run_is_refused(
    tiny: RunConfig, second: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train_until(tiny, RunDir(tmp_path / "run"), 5, monkeypatch)
    other = RunDir(tmp_path / "other")
    train_until(data(tiny, sources={str(second): 1.0}), other, 5, monkeypatch)
    mine = run.read_info()["data"]
    run.update_info(data=other.read_info()["data"])
    with pytest.raises(RunError, match="tell of other data"):
        train(tiny, run)
    run.update_info(data={"segments": 7})
    with pytest.raises(RunError, match="does not say what was read"):
        train(tiny, run)
    run.update_info(data=mine)
    train(tiny, run)
    check_counts(run)
