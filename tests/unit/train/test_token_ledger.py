"""Ledger, loader position and metrics agree, and a run in which they do not stops."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_tools import train_until

from foundling.config.errors import MissingOrDamagedError, RunError
from foundling.config.run import RunConfig
from foundling.data.batch_reader import BatchReader
from foundling.data.dataset import DataSet
from foundling.data.order import reopen_order
from foundling.runtime.exits import Exit
from foundling.runtime.run_dir import RunDir, read_lines
from foundling.train import step
from foundling.train.loop import train
from foundling.train.token_ledger import Ledger, StepCounts, TokenCounts


def mixed(tiny: RunConfig, second: Path) -> RunConfig:
    [text] = tiny.data.sources
    sources = {text: 3.0, str(second): 1.0}
    return tiny.replace(data={"sources": sources, "weights_by": "tokens"})


def test_every_step_appends_what_it_read(tiny: RunConfig, second: Path, tmp_path: Path) -> None:
    """Against batches that are made again and counted by hand."""
    config = mixed(tiny, second)
    run = RunDir(tmp_path / "run")
    train(config, run)
    datasets = {name: DataSet(name) for name in config.data.sources}
    order = reopen_order(
        (), datasets, config.data, seed=1, seq_len=64, steps=8, global_batch_tokens=4 * 64
    )
    loader = BatchReader(datasets, order, micro_tokens=4 * 64)
    read = dict.fromkeys(datasets, 0)
    for number, line in enumerate(read_lines(run.metrics_path)):
        [batch] = loader.step(number)
        assert line["step"] == number + 1
        for name, counts in line["sources"].items():
            read[name] += counts["units"]
            epochs = read[name] / datasets[name].units(64, "bestfit")
            assert counts == {
                "units": batch.units[name],
                "positions": batch.units[name] * 64,
                "tokens": batch.by_source[name].tokens,
                "targets": batch.by_source[name].targets,
                "epochs": pytest.approx(epochs, abs=1e-9),
            }
        assert sum(c["targets"] for c in line["sources"].values()) == (batch.targets >= 0).sum()
    assert read == order.consumed(32)


def test_the_end_tells_the_achieved_shares(
    tiny: RunConfig, second: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from foundling.runtime import console

    console.console.cache_clear()
    train(mixed(tiny, second), RunDir(tmp_path / "run"))
    console.console.cache_clear()
    said = capsys.readouterr().out
    [head] = [line for line in said.splitlines() if "of units" in line]
    assert "epochs" in head
    assert "asked for, by tokens:" in said
    rows = [line.split() for line in said.splitlines() if line.strip().startswith("text ")]
    shares = [float(row[-1].rstrip("%")) for row in rows]
    assert sum(shares) == pytest.approx(100, abs=0.02)
    assert max(shares) == pytest.approx(75, abs=5)


def edit_line(number: int, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        lines = read_lines(path)
        change(lines[number])
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    return edit


def flip_byte(path: Path) -> None:
    """In the quotes around a name of the third line."""
    lines = path.read_bytes().split(b"\n")
    lines[2] = lines[2].replace(b'"step"', b'"step\x02', 1)
    path.write_bytes(b"\n".join(lines))


def more(field: str) -> Callable[[dict[str, Any]], None]:
    def change(line: dict[str, Any]) -> None:
        counts = next(iter(line["sources"].values()))
        counts[field] += 1

    return change


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a unit more": (edit_line(1, more("units")), r"\d+ units of .* and metrics\.jsonl \d+"),
    "a target more": (edit_line(0, more("targets")), r"\d+ targets of .* and metrics\.jsonl \d+"),
    "another source": (
        edit_line(2, lambda line: line["sources"].update(x=line["sources"].popitem()[1])),
        r"metrics\.jsonl",
    ),
    "a line twice": (lambda p: p.write_text(p.read_text() + p.read_text()), "missing or double"),
    "a flipped byte": (flip_byte, r"\d+ lines up to step \d+, 1 damaged"),
    "a name that is another": (
        lambda p: p.write_text(p.read_text().replace("sources", "source_", 1)),
        "does not say what it should",
    ),
    "no lines": (lambda p: p.write_text(""), "missing or double"),
    "no file": (Path.unlink, r"has no metrics\.jsonl"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_ledger_that_was_changed_stops_the_resume(
    damage: str, tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train_until(tiny, RunDir(tmp_path / "run"), 5, monkeypatch)
    change, named = DAMAGE[damage]
    change(run.metrics_path)
    files = {path: path.read_bytes() for path in run.path.glob("*.jsonl")}
    del files[run.events_path]
    with pytest.raises(MissingOrDamagedError, match=named) as lost:
        train(tiny, run)
    assert lost.value.exit_code == Exit.DATA
    assert "bring the file back from a copy, or begin another run" in str(lost.value)
    assert f"--start {run.path}@4 " in str(lost.value), "which is there"
    assert {path: path.read_bytes() for path in files} == files, "nothing is cut from them"


@pytest.mark.parametrize("field", ["tokens", "targets", "positions"])
def test_metrics_that_were_changed_stop_the_resume(
    field: str, tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train_until(tiny, RunDir(tmp_path / "run"), 5, monkeypatch)

    def change(line: dict[str, Any]) -> None:
        line[field] += 1

    edit_line(1, change)(run.metrics_path)
    with pytest.raises(RunError, match=rf"{field} and metrics\.jsonl"):
        train(tiny, run)


def test_a_step_that_is_counted_wrong_is_never_saved(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = step.count_step

    def twice(*args: Any) -> StepCounts:
        counts = real(*args)
        extra = {
            name: replace(e, units=e.units + 1)
            for name, e in counts.ledger.by_source_without_filler.items()
        }
        return StepCounts(Ledger(extra), counts.row_len)

    monkeypatch.setattr(step, "count_step", twice)
    run = RunDir(tmp_path / "run")
    with pytest.raises(RunError, match=r"15 units of .* step 3, is after 12"):
        train(tiny, run)
    assert not run.checkpoints.exists()


def test_lines_that_change_while_it_trains_stop_it_at_the_end(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foundling.train import loop

    run = RunDir(tmp_path / "run")
    real = loop.finish

    def meddled(trainer: Any) -> None:
        edit_line(4, more("tokens"))(run.metrics_path)
        real(trainer)

    monkeypatch.setattr(loop, "finish", meddled)
    with pytest.raises(MissingOrDamagedError, match=r"tokens of .* and metrics\.jsonl"):
        train(tiny, run)
    assert run.read_info()["status"] == "running"


def test_filler_is_no_source() -> None:
    ledger = Ledger({"a": TokenCounts(units=1, positions=4), "filler": TokenCounts(positions=8)})
    assert list(ledger.by_source_without_filler) == ["a"]
    assert ledger.total.positions == 12
