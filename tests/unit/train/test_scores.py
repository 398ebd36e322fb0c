"""Held-out scores of a run: one set of documents, and one headline of a mixture everywhere."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from foundling.checkpoint.retention import scores
from foundling.cli.main import run_verb
from foundling.config.data_manifest import Manifest
from foundling.config.run import RunConfig
from foundling.report.lineage import score_series, stages_of
from foundling.report.page import write_report
from foundling.runtime.run_dir import RunDir
from foundling.runtime.run_reader import read_events, read_lineage
from foundling.train import evaluation
from foundling.train.loop import train
from foundling.train.metrics import Metrics
from tests.village import Village

Told = dict[int, dict[str, float]]


@pytest.fixture(scope="module")
def mixture(
    village_config: RunConfig, second: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunDir, str, Told]:
    """A run on a third of one source and two thirds of another, what the screen said, and what
    TensorBoard was handed."""
    text = next(iter(village_config.data.sources))
    config = village_config.replace(
        data={"sources": {text: 1.0, str(second): 2.0}, "allow_repeat": 9.0},
        checkpoint={"every": 4, "keep": 1, "keep_best": 2},
        eval={"tokens": 300},
    )
    run, told, said = RunDir(tmp_path_factory.mktemp("mixture") / "run"), Told(), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Metrics, "scores", lambda self, step, values: told.update({step: values}))
        patch.setattr(evaluation, "say", said.append)
        train(config, run)
    return run, "\n".join(said), told


def test_every_evaluation_reads_the_same_documents_and_the_last_one_all_as_well(
    mixture: tuple[RunDir, str, Told],
) -> None:
    first, last = read_events(mixture[0]).measured["evaluated"]
    assert first["measure"] == last["measure"]
    read = [[part["documents"] for part in line["sources"].values()] for line in (first, last)]
    assert read[0] == read[1]
    assert "full_bpb" not in first
    for name, part in last["full_sources"].items():
        every = sum(shard.documents for shard in Manifest.load(Path(name)).val)
        assert part["documents"] == every > last["sources"][name]["documents"]


def test_screen_report_eval_and_keep_best_have_the_same_headline(
    mixture: tuple[RunDir, str, Told], capsys: pytest.CaptureFixture[str]
) -> None:
    run, said, told = mixture
    lines = read_events(run).measured["evaluated"]
    for line in lines:
        one, other = line["sources"].values()
        for name in ("bpb", "floor_bpb", "loss", "floor_loss"):
            assert line[name] == pytest.approx((one[name] + 2 * other[name]) / 3)
        assert f"step {line['step']}: bpb {line['bpb']:.4f}  floor_bpb" in said
        assert told[line["step"]]["bpb"] == line["bpb"]
    full = lines[-1]["full_bpb"]
    assert f"full_bpb {full:.4f}" in said
    assert scores(run.checkpoints) == {line["step"]: line["bpb"] for line in lines}
    for words in (["--questions", "0"], ["bpb"]):
        run_verb(["eval", str(run.path), *words, "--json", "--device", "cpu"])
        found = json.loads(capsys.readouterr().out)
        value = found["tasks"]["bpb"]["value"] if "tasks" in found else found["full_bpb"]
        assert value == pytest.approx(full, rel=1e-6)
    run_verb(["eval", str(run.path), "--questions", "1", "--device", "cpu"])
    assert f"{full:.4f}" in capsys.readouterr().out
    series = score_series(stages_of(read_lineage(run)))
    shown = {name: [point.value for _, p in parts for point in p] for name, parts in series.items()}
    assert shown["bpb"] == [line["bpb"] for line in lines], "points of one curve are of one set"
    assert shown["full_bpb"] == pytest.approx([full], rel=1e-6)
    tile = write_report([run]).read_text().partition("bits per byte</dt>")[2]
    assert f">{full:.3f}<" in tile[:100]


def test_a_source_that_holds_nothing_out_costs_the_others_no_score(
    mixture: tuple[RunDir, str, Told], tiny: RunConfig, village: Village, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    shutil.copytree(village.chat, small)
    replace(Manifest.load(small), val=()).save(small)
    sources = {str(small): 1.0, str(village.chat): 2.0, str(village.text): 1.0}
    config = tiny.replace(
        train={"start": str(mixture[0].path), "horizon": 1},
        data={"sources": sources},
    )
    run = RunDir(tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr(evaluation, "say", said.append)
        train(config, run)
    (line,) = read_events(run).measured["evaluated"]
    chat, text = (line["sources"][str(folder)] for folder in (village.chat, village.text))
    assert set(line["sources"]) == {str(village.chat), str(village.text)}
    assert line["bpb"] == text["bpb"]
    assert line["loss"] == pytest.approx((2 * chat["loss"] + text["loss"]) / 3)
    assert scores(run.checkpoints) == {1: line["loss"]}, "bits say nothing of conversations"
    assert any(f"nothing is held out of {small}" in text for text in said)
