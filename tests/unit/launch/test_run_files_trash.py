"""Throwing runs away and getting them back; what may delete, and what never does."""

import json
import shlex
import time
from pathlib import Path

import pytest

from foundling.cli.main import run_verb
from foundling.config.errors import ConfigError, RunError
from foundling.launch.run_files import (
    NOTE,
    empty_trash,
    list_trash,
    move_to_trash,
    parse_age,
    restore,
)
from foundling.report.runs import list_runs
from foundling.runtime.lock import RunLock
from foundling.runtime.run_dir import RunDir


def make_run(path: Path, status: str = "running", parent: Path | None = None) -> Path:
    stated = {"path": str(parent), "step": 3} if parent else None
    RunDir(path).write_info({"chat": False, "status": status, "parent": stated})
    (path / "metrics.jsonl").write_text('{"step": 1, "total_tokens": 5}\n')
    return path


def content(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_a_run_goes_and_comes_back_as_it_was(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    before = content(run)
    place = move_to_trash(run)
    assert not run.exists()
    assert place.parent == tmp_path / ".trash"
    assert list_runs(tmp_path) == [], "the trash is not listed among the runs"
    assert restore(Path("a"), tmp_path) == run
    assert content(run) == before


def test_two_of_one_name_and_the_newest_comes_back_first(tmp_path: Path) -> None:
    for number in (1, 2):
        run = make_run(tmp_path / "a")
        (run / "which").write_text(str(number))
        move_to_trash(run)
        time.sleep(0.01)
    assert len(list_trash(tmp_path)) == 2
    restore(tmp_path / "a", tmp_path)
    assert (tmp_path / "a" / "which").read_text() == "2"
    older = list_trash(tmp_path)[0].path
    with pytest.raises(RunError, match="exists again"):
        restore(older, tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    assert restore(older, tmp_path) == tmp_path / "a"
    assert (tmp_path / "a" / "which").read_text() == "1"


def test_a_live_run_and_the_parent_of_one_stay(tmp_path: Path) -> None:
    run, child = make_run(tmp_path / "a"), make_run(tmp_path / "b", parent=tmp_path / "a")
    with RunLock(run), pytest.raises(RunError, match="in use by process"):
        move_to_trash(run)
    with RunLock(child), pytest.raises(RunError, match="parent of"):
        move_to_trash(run)
    move_to_trash(run)


def test_what_is_no_run_and_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(RunError, match="not a run"):
        move_to_trash(tmp_path / "data")
    with pytest.raises(RunError, match="there is nothing"):
        restore(Path("a"), tmp_path)
    broken = make_run(tmp_path / "broken")
    (broken / "run.json").write_text('{"sche')
    move_to_trash(broken)
    assert list_trash(tmp_path)[0].status == "unknown"


def test_what_is_thrown_away_is_a_run_or_the_rest_of_a_start(tmp_path: Path) -> None:
    rest = tmp_path / "rest"
    (rest / "logs").mkdir(parents=True)
    (rest / "lock").touch()
    assert move_to_trash(rest).is_dir()
    other = tmp_path / "other"
    other.mkdir()
    for name in ("run.json", "notes.md"):
        (other / name).write_text("{}")
    with pytest.raises(RunError, match=r"beside it stands notes\.md"):
        move_to_trash(other)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"holds no run\.json"):
        move_to_trash(tmp_path / "empty")


def test_emptying_goes_by_age_and_spares_the_finished(tmp_path: Path) -> None:
    for name, status in (("old", "running"), ("new", "running"), ("done", "finished")):
        place = move_to_trash(make_run(tmp_path / name, status))
        if name != "new":
            note = json.loads((place / NOTE).read_text())
            (place / NOTE).write_text(json.dumps({**note, "since": time.time() - 40 * 86400}))
    deleted, kept = empty_trash(tmp_path, parse_age("30d"), finished=False)
    assert [entry.origin.name for entry in deleted] == ["old"]
    assert [entry.origin.name for entry in kept] == ["done"]
    assert sorted(entry.origin.name for entry in list_trash(tmp_path)) == ["done", "new"]
    deleted, _ = empty_trash(tmp_path, parse_age("30d"), finished=True)
    assert [entry.origin.name for entry in deleted] == ["done"]


def test_ages() -> None:
    assert parse_age("2w") == 14 * 86400
    assert parse_age("1.5h") == 5400
    with pytest.raises(ConfigError, match="30d"):
        parse_age("a month")


def test_the_trash_is_listed_unless_told_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_verb(["runs", "rm", "--list"])
    assert capsys.readouterr().out == "nothing is in the trash of runs\n"
    run = make_run(tmp_path / "runs" / "a", "running")  # so says one that was stopped
    run_verb(["runs", "rm", str(run)])
    capsys.readouterr()
    run_verb(["runs", "rm", "--list"])
    assert capsys.readouterr().out.startswith(f"stopped    {run}")


def test_the_verbs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "a", "finished")
    run_verb(["runs", "rm", str(run)])
    run_verb(["runs", "rm", "--list", "--folder", str(tmp_path)])
    assert "finished" in capsys.readouterr().out
    run_verb(["runs", "rm", "--empty", "9d", "--folder", str(tmp_path)])
    assert capsys.readouterr().out == ""
    run_verb(["runs", "rm", "--empty", "0m", "--folder", str(tmp_path)])
    assert "kept" in capsys.readouterr().out
    run_verb(["runs", "rm", "--restore", str(run)])
    assert run.is_dir()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "needs a run"),
        (["--empty"], "--empty needs a value; see"),
        (["--list", "a"], "RUN a has no effect with --list"),
        (["--empty", "0m", "a"], "RUN a has no effect with --empty"),
        (["a", "--finished"], "--finished has no effect"),
        (["a", "--folder", "b"], "--folder has no effect"),
        (
            ["a", "--list", "--restore"],
            "--list has no effect with --restore; leave one of them out",
        ),
    ],
)
def test_what_is_thrown_away_and_what_is_done_to_the_trash_do_not_mix(
    words: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = move_to_trash(make_run(tmp_path / "runs" / "old"))
    make_run(tmp_path / "a")
    with pytest.raises(ConfigError, match=named):
        run_verb(["runs", "rm", *words])
    assert place.is_dir()
    assert RunDir("a").exists


def test_the_printed_command_brings_a_run_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in (Path("t 1"), Path("runs/t1"), tmp_path / "deep" / "t1"):
        make_run(place)
        run_verb(["runs", "rm", str(place)])
        said = capsys.readouterr().out
        command = shlex.split(said.split("`")[-2])
        assert command[0] == "foundling"
        run_verb(command[1:])
        assert RunDir(place).exists
        run_verb(["runs", "rm", str(place)])
        run_verb(["runs", "rm", str(place), "--restore"])
        assert RunDir(place).exists
