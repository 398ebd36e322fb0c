"""What a model card says of scores: those of the exported step, each with its error and size."""

import json
from pathlib import Path

from foundling.checkpoint.convert.publish import RunOnCard, _scores
from foundling.runtime.run_dir import RunDir


def test_the_card_has_core_and_the_tasks_of_its_step(tmp_path: Path) -> None:
    folder = tmp_path / "evals" / "step-8"
    folder.mkdir(parents=True)
    core = {"name": "core_partial", "value": 0.1139, "stderr": 0.0051, "n": 9345}
    tasks = {
        "copa": {"value": 0.62, "metric": "accuracy", "stderr": 0.049, "n": 100},
        "completions": {"value": 48.0, "metric": "tokens", "stderr": 0.0, "n": 6},
    }
    (folder / "scores.json").write_text(json.dumps({"tasks": tasks, "core": core}))
    card = "\n".join(_scores([RunOnCard(RunDir(tmp_path), 8, {}, {})]))
    assert "| core partial (mean of centred accuracies) | 0.1139 | 0.0051 | 9345 |" in card
    assert "| copa (accuracy) | 0.62 | 0.049 | 100 |" in card
    assert "completions" not in card
    assert not list(_scores([RunOnCard(RunDir(tmp_path), 9, {}, {})]))
