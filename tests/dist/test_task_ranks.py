"""Tasks on several ranks: shared out where each has the whole model, together where none has."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_replicate import launch

from foundling.cli import run_verb
from foundling.config import RunConfig
from foundling.eval.results import read_examples
from foundling.runtime import RunDir
from foundling.runtime.rundir import read_lines
from foundling.train.loop import train
from tests.unit.eval.small_bundle import write_bundle

NAMES = ("copa", "winograd", "squad", "spelling")
LAYOUTS: list[Any] = [
    pytest.param({}, id="replicas"),
    pytest.param({"shard": 2}, id="fsdp"),
    pytest.param({"tensor": 2}, id="tensor", marks=pytest.mark.full),
]


def asking(config: RunConfig, folder: Path) -> RunConfig:
    bundle = write_bundle(folder / "eval_bundle.zip")
    tasks = (f"copa={bundle}", *NAMES[1:])
    return replace(
        config,
        train=replace(config.train, steps=4, batch_size=2, global_batch_tokens=8 * 64),
        eval=replace(config.eval, every=0, tokens=65536, tasks=tasks, tasks_every=4, tasks_limit=5),
    )


@pytest.mark.parametrize("degrees", LAYOUTS)
def test_ranks_score_as_one_process_does(
    degrees: dict[str, Any], tiny: RunConfig, tmp_path: Path
) -> None:
    config = asking(tiny, tmp_path)
    one, many = RunDir(tmp_path / "one"), RunDir(tmp_path / "many")
    train(config, one)
    launch(replace(config, parallel=replace(config.parallel, **degrees)), many.path, 2)
    (line,) = read_lines(many.task_scores_path)
    assert set(line["tasks"]) == set(NAMES)
    folders = [run.path / "evals" / "step-4" for run in (one, many)]
    assert not list(folders[1].glob("*.part-*"))
    for task in NAMES:
        left, right = (read_examples(folder, task) for folder in folders)
        assert [x["id"] for x in left] == [x["id"] for x in right]
        if task == "copa":  # weights differ by rounding after four steps of Adam
            for x, y in zip(left, right, strict=True):
                assert y["losses"] == pytest.approx(x["losses"], abs=5e-3)


def test_eval_shares_examples_among_processes(
    tiny: RunConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bundle = write_bundle(tmp_path / "eval_bundle.zip")
    train(replace(tiny, train=replace(tiny.train, steps=2)), RunDir(tmp_path / "run"))
    found = []
    for processes in ("1", "2"):
        words = ["eval", str(tmp_path / "run"), "core,spelling", "--bundle", str(bundle)]
        words += ["--limit", "5", "--json", "--nproc", processes]
        capfd.readouterr()
        run_verb([*words, "--out", str(tmp_path / processes)])
        found.append(json.loads(capfd.readouterr().out))
    for name, entry in found[0]["tasks"].items():
        assert found[1]["tasks"][name]["value"] == entry["value"], name
    assert found[0]["core"]["value"] == pytest.approx(found[1]["core"]["value"])
