"""Which run came from which, and what differs between two of them."""

import json
from pathlib import Path

import pytest
from run_fakes import make_run, write_final

from foundling.cli.main import run_verb
from foundling.config.errors import RunError, UserError
from foundling.config.load import dump_yaml, load_run_config
from foundling.report.runs import compare_runs, describe_comparison, draw_tree, lineage
from foundling.runtime.run_dir import RunDir


def change_lr(run: RunDir, lr: float) -> None:
    config = load_run_config(run.config_path)
    run.config_path.write_text(dump_yaml(config.replace(optim={"lr": lr})))


@pytest.fixture
def family(tmp_path: Path) -> Path:
    """A root, two branches of it, a grandchild, and one whose parent is gone."""
    home = tmp_path / "runs"
    root = make_run(home / "root")
    late = {"path": str(root.path), "step": 20, "kind": "branch"}
    early = {"path": str(root.path), "step": 10, "kind": "branch"}
    change_lr(make_run(home / "late", parent=late), 5e-4)
    make_run(home / "early", parent=early)
    make_run(home / "chat", chat=True, parent={"path": str(home / "early"), "step": 30})
    make_run(home / "orphan", parent={"path": "/gone/away", "step": 7})
    make_run(home / ".trash" / "old--1", parent=late)
    return home


def test_the_tree_has_children_below_parents_by_the_step_they_left_at(family: Path) -> None:
    lines = list(draw_tree(lineage(family)))
    names = [line.split("  ")[0].replace(str(family), "") for line in lines]
    assert names == [
        "(/gone/away, not here)",
        "└─ /orphan",
        "/root",
        "├─ /early",
        "│",
        "└─ /late",
    ]
    assert "└─" in lines[4]
    assert "chat" in lines[4]
    assert "began with the weights of step 30" in lines[4]
    assert "branched off step 20 with optim.lr 0.003 -> 0.0005" in lines[5]
    assert "not here" not in "".join(lines[1:])


def test_moved_together_they_are_still_a_family(family: Path, tmp_path: Path) -> None:
    family.rename(tmp_path / "elsewhere")
    found = {Path(run["path"]).name: run for run in lineage(tmp_path / "elsewhere")}
    assert found["late"]["parent"] == str((tmp_path / "elsewhere" / "root").resolve())
    assert "old--1" not in found


def test_settings_come_before_numbers_and_steps_are_common(family: Path) -> None:
    write_final(RunDir(family / "late"))
    short = make_run(family / "short", steps=12)
    paths = [family / "root", family / "late", short.path]
    found = compare_runs(paths)
    assert found["settings"] == {"optim.lr": ["0.003", "0.0005", "0.003"]}
    steps = list(found["metrics"]["loss"])
    assert steps[-1] == 12
    assert len(steps) == 10
    assert found["metrics"]["loss"][12] == [8 / 12] * 3
    assert list(found["evals"]["bpb"]) == [10]
    assert found["scores"]["full_bpb"] == [None, 0.51, None]
    lines = list(describe_comparison(found))
    heads = ("settings that differ", "loss", "held-out bpb", "final scores")
    order = [next(i for i, line in enumerate(lines) if line.startswith(head)) for head in heads]
    assert order == sorted(order)
    assert any("+0" in line for line in lines), "differences from A are shown"


def test_equal_runs_and_runs_without_common_steps(family: Path, tmp_path: Path) -> None:
    same = list(describe_comparison(compare_runs([family / "root", family / "early"])))
    assert "the settings are the same" in same
    empty = make_run(tmp_path / "empty", steps=0)
    lines = list(describe_comparison(compare_runs([family / "root", empty.path])))
    assert "loss: no step is common to all of them" in lines
    with pytest.raises(RunError, match="two runs"):
        compare_runs([family / "root"])


def test_the_verbs(family: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_verb(["runs", "list", str(family), "--tree", "--json"])
    assert len(json.loads(capsys.readouterr().out)) == 5
    run_verb(["runs", "list", "--tree", str(family)])
    assert "├─" in capsys.readouterr().out
    run_verb(["compare", str(family / "root"), str(family / "late"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["runs"]["settings"]
    assert found["scores"] is None
    two = [str(family / "root"), str(family / "late")]
    run_verb(["compare", *two])
    told = capsys.readouterr().out
    assert told.index("optim.lr") < told.index("no p-values: ")
    assert "has no scores of examples" in told
    run_verb(["compare", *two, str(family / "early")])
    assert "p-values" not in capsys.readouterr().out
    for words, refused in (
        ([*two, "--tasks", "core"], "has no scores of examples"),
        ([*two, two[0], "--tasks", "core"], "--tasks is of two models"),
    ):
        with pytest.raises(UserError, match=refused):
            run_verb(["compare", *words])


def test_a_slip_in_the_folders_name_is_not_a_folder_without_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([], ["--tree"]):
        with pytest.raises(RunError, match="nowhere is not a folder"):
            run_verb(["runs", "list", *words, str(tmp_path / "nowhere")])
    run_verb(["runs", "list", "--tree", str(tmp_path)])
    assert capsys.readouterr().out.startswith("no runs in")
