"""Tasks on several ranks: shared out where each has the whole model, together where none has."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from layout_ranks import train_run
from worlds import World

from foundling.cli.main import run_verb
from foundling.config.run import RunConfig
from foundling.eval.evaluate import EvalRequest, score
from foundling.eval.results import read_examples
from foundling.runtime.run_dir import RunDir, read_lines
from foundling.runtime.run_reader import read_events
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
    return config.replace(train={"horizon": 4, "batch_size": 2, "global_batch_tokens": 8 * 64}, eval={"every": 0, "tokens": 65536, "tasks": tasks, "tasks_every": 4, "tasks_limit": 5})


@pytest.mark.parametrize("degrees", LAYOUTS)
def test_ranks_score_as_one_process_does(
    degrees: dict[str, Any], tiny: RunConfig, opened: dict[int, World], tmp_path: Path
) -> None:
    config = asking(tiny, tmp_path)
    one, many = RunDir(tmp_path / "one"), RunDir(tmp_path / "many")
    train(config, one)
    parallel = config.parallel.replace(**degrees)
    opened[2].run(train_run, config.replace(parallel=parallel), many.path)
    (line,) = read_events(many).measured["scored"]
    assert set(line["tasks"]) == set(NAMES)
    folders = [run.path / "evals" / "step-4" for run in (one, many)]
    assert not list(folders[1].glob("*.part-*"))
    for task in NAMES:
        left, right = (read_examples(folder, task) for folder in folders)
        assert [x["id"] for x in left] == [x["id"] for x in right]
        if task == "copa":  # weights differ by rounding after four steps of Adam
            for x, y in zip(left, right, strict=True):
                assert y["losses"] == pytest.approx(x["losses"], abs=5e-3)


def test_a_file_that_one_rank_lacks_is_told_and_nobody_waits(
    tiny: RunConfig, opened: dict[int, World], tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    opened[2].run(train_without, asking(tiny, tmp_path), run.path)
    assert run.read_info()["status"] == "finished"
    (event,) = [line for line in read_lines(run.events_path) if line["event"] == "failed"]
    assert event["what"] == "tasks"


def train_without(config: RunConfig, run: Path) -> None:
    """Train where the last rank's questions are gone once training has begun."""
    from foundling.config.errors import DataError
    from foundling.tasks.registry import Registry

    real, asked = Registry.find, 0

    def find(self: Registry, words: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked > 1 and os.environ["RANK"] == "1":
            raise DataError("copa.zip does not exist; give the evaluation bundle of CORE.")
        return real(self, words)

    Registry.find = find  # type: ignore[method-assign]
    try:
        train_run(config, run)
    finally:
        Registry.find = real  # type: ignore[method-assign]


def test_eval_shares_examples_among_processes(
    tiny: RunConfig, opened: dict[int, World], tmp_path: Path
) -> None:
    bundle = write_bundle(tmp_path / "eval_bundle.zip")
    train(tiny.replace(train={"horizon": 2}), RunDir(tmp_path / "run"))
    asked = EvalRequest(
        source=str(tmp_path / "run"),
        tasks=("core", "spelling"),
        bundle=str(bundle),
        limit=5,
        device="cpu",
    )
    one = score(replace(asked, out=tmp_path / "1"))
    many = opened[2].run(score, replace(asked, out=tmp_path / "2"))[0]
    for name, entry in one["tasks"].items():
        assert many["tasks"][name]["value"] == entry["value"], name
    assert one["core"]["value"] == pytest.approx(many["core"]["value"])


@pytest.mark.full
def test_the_verb_starts_processes_of_its_own(
    tiny: RunConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tiny.replace(train={"horizon": 2}), RunDir(tmp_path / "run"))
    words = ["eval", str(tmp_path / "run"), "spelling", "--limit", "5", "--json", "--nproc", "2"]
    capfd.readouterr()
    run_verb(words)
    assert json.loads(capfd.readouterr().out)["tasks"]["spelling"]["n"] == 5
