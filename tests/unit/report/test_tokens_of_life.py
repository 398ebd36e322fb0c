"""`runs show`: the tokens that a model was trained on in its whole life, each step once."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from foundling.report.lineage import tokens_of_life
from foundling.report.runs import describe_run, show_run
from foundling.runtime.run_dir import RunDir


def make_run(path: Path, steps: int, source: str, parent: Any = None, chat: bool = False) -> RunDir:
    """A run that read one unit of ten tokens a step."""
    run = RunDir(path)
    run.path.mkdir()
    run.write_info({"chat": chat, "status": "finished", "parent": parent})
    counts = {"units": 1, "positions": 12, "tokens": 10, "targets": 9}
    lines = [
        {
            "step": step,
            "total_tokens": 10 * step,
            "tokens": 10,
            "sources": {source: counts | {"epochs": step / 8}},
        }
        for step in range(1, steps + 1)
    ]
    run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.fixture
def family(tmp_path: Path) -> list[RunDir]:
    """Pretrained for 10 steps, mid-trained from its 8th, fine-tuned from that one's last."""
    first = make_run(tmp_path / "first", 10, "text")
    middle = make_run(tmp_path / "middle", 6, "text", {"path": str(first.path), "step": 8})
    last = make_run(tmp_path / "last", 4, "chat", {"path": str(middle.path), "step": 6}, chat=True)
    return [first, middle, last]


def test_a_model_counts_what_its_weights_were_trained_on(family: list[RunDir]) -> None:
    shown = show_run(family[-1])
    assert [(part["stage"], part["steps"]) for part in shown["tokens_read"]] == [
        ("text", 8),
        ("text", 6),
        ("chat", 4),
    ]
    assert shown["tokens_read"][0]["sources"]["text"] == {
        "units": 8,
        "positions": 96,
        "tokens": 80,
        "targets": 72,
        "epochs": 1.0,
        "units_share": 1.0,
        "tokens_share": 1.0,
    }
    assert shown["tokens_total"] == {"units": 18, "positions": 216, "tokens": 180, "targets": 162}
    assert shown["tokens_by_source"] == {"chat": 40}
    lines = [line.split() for line in describe_run({**shown, "last": {}})]
    assert ["chat", "chat", "4", "40", "36", "0.500", "100.00%", "100.00%"] in lines
    assert ["total", "18", "180", "162"] in lines
    json.dumps(shown)


def test_runs_that_were_moved_together_are_found(family: list[RunDir], tmp_path: Path) -> None:
    home = tmp_path / "elsewhere"
    home.mkdir()
    for run in family:
        shutil.move(run.path, home)
    assert [part.steps for part in tokens_of_life(RunDir(home / "last"))] == [8, 6, 4]


def test_an_ancestor_that_is_gone_is_said(family: list[RunDir]) -> None:
    shutil.rmtree(family[0].path)
    shown = show_run(family[-1])
    assert shown["tokens_total"]["tokens"] == 100
    text = "\n".join(describe_run({**shown, "last": {}}))
    assert "first is not there, and its tokens are not counted." in text


def test_a_run_without_a_ledger_is_said(family: list[RunDir]) -> None:
    family[1].metrics_path.unlink()
    text = "\n".join(describe_run({**show_run(family[-1]), "last": {}}))
    assert "middle has no metrics.jsonl" in text


def test_a_circle_of_parents_ends(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", 2, "a", {"path": str(tmp_path / "two"), "step": 2})
    make_run(tmp_path / "two", 2, "a", {"path": str(one.path), "step": 1})
    assert [part.steps for part in tokens_of_life(one)] == [2, 2]
