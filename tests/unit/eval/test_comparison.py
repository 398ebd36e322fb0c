"""Whole comparisons of written evaluations."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foundling.cli.main import run_verb
from foundling.config.errors import DataError, NotScoredError, RunError
from foundling.eval.comparison import compare, describe_verdict
from foundling.runtime.run_dir import RunDir
from tests.unit.eval.compare_samples import equal_models, write_scores


@pytest.fixture
def two(tmp_path: Path) -> tuple[str, str]:
    rng = np.random.default_rng(3)
    easy, hard = equal_models(rng, 300, 0.5), equal_models(rng, 200, 0.3)
    a = write_scores(tmp_path / "a", {"easy": easy[0], "hard": hard[0] * 0})
    b = write_scores(tmp_path / "b", {"easy": easy[1], "hard": hard[1]})
    return str(a), str(b)


def test_each_task_and_all_together(two: tuple[str, str]) -> None:
    found = compare([two[0]], [two[1]])
    easy, hard = found["tasks"]["easy"], found["tasks"]["hard"]
    assert (easy["n"], easy["better"], hard["better"]) == (300, None, "B")
    assert easy["p"] > 0.05 > hard["p_holm"] >= hard["p"]
    assert hard["needed"] < hard["n"]
    assert easy["needed"] is None or easy["needed"] > easy["n"]
    assert found["all"]["tasks"] == ["easy", "hard"]
    mean = (easy["difference"] + hard["difference"]) / 2
    assert found["all"]["difference"] == pytest.approx(mean)
    told = "\n".join(describe_verdict(found))
    assert "in all" in told
    assert "B is better than A" in told


def test_the_order_of_the_examples_and_of_the_models_is_nothing(two: tuple[str, str]) -> None:
    forth, back = compare([two[0]], [two[1]]), compare([two[1]], [two[0]])
    for name, entry in forth["tasks"].items():
        assert back["tasks"][name]["p"] == entry["p"]
        assert back["tasks"][name]["difference"] == pytest.approx(-entry["difference"])
    path = Path(two[1]) / "hard.jsonl"
    path.write_text("\n".join(reversed(path.read_text().splitlines())) + "\n")
    assert compare([two[0]], [two[1]])["tasks"] == forth["tasks"]


def test_fewer_bits_are_better_and_stand_apart(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    bits, size = rng.normal(1.0, 0.2, 90), {"text": rng.integers(100, 3000, 90)}
    for name, shift in (("a", 0.0), ("b", -0.05)):
        noisy = bits + shift + rng.normal(0, 0.02, 90)
        write_scores(tmp_path / name, {"text": noisy}, metric="bpb", weights=size)
    found = compare([str(tmp_path / "a")], [str(tmp_path / "b")])
    assert found["tasks"]["text"]["better"] == "B"
    assert found["tasks"]["text"]["difference"] == pytest.approx(-0.05, abs=0.01)
    assert found["all"]["better"] == "B"


def test_what_an_evaluation_calls_its_bits_is_known_here(tmp_path: Path) -> None:
    from foundling.eval.bits_per_byte import bpb_entry

    for name, bits in (("a", 0.9), ("b", 0.5)):
        write_scores(tmp_path / name, {"bpb": [bits + n / 100 for n in range(9)]})
        scores = json.loads((tmp_path / name / "scores.json").read_text())
        line = {"score": bits, "weight": 1.0, "nats": 1.0, "tokens": 1, "source": "x", "bytes": 1}
        scores["tasks"]["bpb"]["metric"] = bpb_entry([line], {"x": 1.0})["metric"]
        (tmp_path / name / "scores.json").write_text(json.dumps(scores))
    assert compare([str(tmp_path / "a")], [str(tmp_path / "b")])["tasks"]["bpb"]["better"] == "B"


def settled(folder: Path, task: str, **settings: Any) -> str:
    scores = json.loads((folder / "scores.json").read_text())
    scores["tasks"][task]["settings"] = settings
    (folder / "scores.json").write_text(json.dumps(scores))
    return str(folder)


def test_other_questions_are_left_out_and_another_way_of_asking_is_noted(tmp_path: Path) -> None:
    folders = [write_scores(tmp_path / name, {"t": [1, 0, 1], "u": [1, 0]}) for name in "ab"]
    a = settled(folders[0], "t", questions="x", limit=3)
    b = settled(folders[1], "t", questions="y", limit=3)
    found = compare([a], [b])
    assert list(found["tasks"]) == ["u"]
    assert any("t left out: the questions are not the same" in note for note in found["notes"])
    found = compare([a], [settled(folders[1], "t", questions="x", limit=9)])
    assert any("t: not asked in the same way (limit)" in note for note in found["notes"])


def test_open_texts_are_not_compared_and_few_examples_are_told_as_too_few(tmp_path: Path) -> None:
    for name, right in (("a", 0), ("b", 1)):
        folder = write_scores(tmp_path / name, {"completions": [4, 5], "t": [right] * 3})
        scores = json.loads((folder / "scores.json").read_text())
        scores["tasks"]["completions"]["metric"] = "tokens"
        (folder / "scores.json").write_text(json.dumps(scores))
    found = compare([str(tmp_path / "a")], [str(tmp_path / "b")])
    assert list(found["tasks"]) == ["t"]
    assert found["tasks"]["t"]["better"] is None
    assert found["tasks"]["t"]["needed"] == 5


def test_scales_are_not_mixed(tmp_path: Path) -> None:
    for name in "ab":
        folder = write_scores(tmp_path / name, {"quiz": [0, 1, 1, 0], "bits": [1.5, 2.5, 1.0]})
        scores = json.loads((folder / "scores.json").read_text())
        scores["tasks"]["bits"]["metric"] = "bpb"
        (folder / "scores.json").write_text(json.dumps(scores))
    found = compare([str(tmp_path / "a")], [str(tmp_path / "b")])
    assert found["all"]["tasks"] == ["quiz"]
    assert any("another scale: bits" in note for note in found["notes"])


def test_only_common_examples_count_and_the_rest_is_told(tmp_path: Path) -> None:
    a = write_scores(tmp_path / "a", {"t": [0, 1, 0, 1], "alone": [1]})
    b = write_scores(tmp_path / "b", {"t": [1, 1, 1, 1]}, first=2)
    found = compare([str(a)], [str(b)])
    assert (found["tasks"]["t"]["n"], found["tasks"]["t"]["unmatched"]) == (2, 4)
    assert found["notes"] == ["not on both sides: alone"]
    assert any("4 examples that only one side has" in line for line in describe_verdict(found))


def test_contaminated_examples_are_shown_apart(tmp_path: Path) -> None:
    marks = {"t": {n: {"contaminated": True} for n in range(10)}}
    a = write_scores(tmp_path / "a", {"t": [0] * 40})
    b = write_scores(tmp_path / "b", {"t": [1] * 10 + [0, 1] * 15}, more=marks)
    entry = compare([str(a)], [str(b)])["tasks"]["t"]
    assert (entry["contaminated"], entry["clean"]["n"]) == (10, 30)
    assert entry["clean"]["difference"] == pytest.approx(0.5)
    assert entry["clean"]["p"] > entry["p"]


def test_several_seeds_a_side(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    sides = []
    for side, ease in (("a", 0.4), ("b", 0.6)):
        chances = [ease + shift for shift in (-0.05, 0.0, 0.05)]
        folders = [
            write_scores(tmp_path / f"{side}{n}", {"t": (rng.random(400) < chance) * 1.0})
            for n, chance in enumerate(chances)
        ]
        sides.append([str(folder) for folder in folders])
    entry = compare(*sides)["tasks"]["t"]
    assert entry["n"] == 400
    assert 0.0001 < entry["seeds"]["p"] < 0.05
    assert entry["seeds"]["p"] > entry["p"]
    assert 2 <= entry["seeds"]["needed"] <= 10


def test_the_newest_scores_of_a_run_are_meant(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    with pytest.raises(DataError, match=r"neither a run nor a folder with scores\.json"):
        compare([str(run.path)], [str(run.path)])
    run.write_info({"chat": False})
    with pytest.raises(RunError, match=r"steps that have: none.*foundling eval"):
        compare([str(run.path)], [str(run.path)])
    for step, right in ((9, 0), (10, 1)):
        write_scores(run.path / "evals" / f"step-{step}", {"t": [right] * 9})
    (run.path / "checkpoints" / "step-00000009").mkdir(parents=True)
    for old in (f"{run.path}@9", str(run.path / "checkpoints" / "step-00000009")):
        assert compare([old], [str(run.path)])["tasks"]["t"]["difference"] == 1.0
    with pytest.raises(RunError, match=r"@7 has no scores.*9, 10"):
        compare([f"{run.path}@7"], [str(run.path)])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "t-0", "score": 1}', "t-0 twice"),
        ('{"id": "x", "score": NaN}', "no example with an id"),
        ('{"score": 1}', "no example with an id"),
        ('{"id": "x", "score": 1, "weight": -1}', "no example with an id"),
    ],
)
def test_damaged_examples_are_refused(tmp_path: Path, line: str, message: str) -> None:
    folder = write_scores(tmp_path / "a", {"t": [1, 0]})
    with open(folder / "t.jsonl", "a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=message):
        compare([str(folder)], [str(folder)])


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    a = write_scores(tmp_path / "a", {"t": [1, 0]})
    b = write_scores(tmp_path / "b", {"t": [1, 0]}, shots=5)
    with pytest.raises(NotScoredError, match=r"t left out: shots differs \(0 and 5\)"):
        compare([str(a)], [str(b)])
    with pytest.raises(DataError, match="other was not scored on both sides"):
        compare([str(a)], [str(a)], ["other"])
    (b / "scores.json").write_text('{"schema": 7, "tasks": {}}')
    with pytest.raises(DataError, match="schema 7"):
        compare([str(a)], [str(b)])


def test_the_verb(two: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    run_verb(["compare", *two, "--tasks", "hard", "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["runs"] is None
    assert list(found["scores"]["tasks"]) == ["hard"]
    run_verb(["compare", *two])
    assert "examples needed" in capsys.readouterr().out
