"""`runs show`, `verify` and `pin`: what they print of checkpoints, and what they refuse."""

import json
import shutil
from pathlib import Path

import pytest
from checkpoint_samples import sample

from foundling.checkpoint.folders import list_checkpoints
from foundling.checkpoint.retention import note_score, retain
from foundling.checkpoint.writer import save
from foundling.cli.main import run_verb
from foundling.config.errors import UserError
from foundling.config.run import CheckpointConfig
from foundling.runtime.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with checkpoints of steps 2, 4 and 6."""
    run = RunDir(tmp_path / "my run")
    run.path.mkdir()
    run.write_info({"chat": False, "status": "running", "parent": None})
    for step in (2, 4, 6):
        save(run.checkpoints, step, sample(step), {"step": step})
    return run


def spoil(run: RunDir, step: int) -> None:
    file = run.checkpoints / f"step-{step:08d}" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[60] ^= 1
    file.write_bytes(content)


def call(*words: object) -> None:
    run_verb(["runs", *map(str, words)])


def test_a_list_names_every_one_and_what_is_left_over(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    call("pin", f"{run.path}@2")
    note_score(run.checkpoints, 4, 1.25)
    (run.checkpoints / "step-00000006" / "meta.json").unlink()
    shutil.copytree(
        run.checkpoints / "step-00000004", run.checkpoints / "step-00000008.tmp-99999999"
    )
    capsys.readouterr()
    call("show", run.checkpoints)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["step", "2", "unverified"],
        ["step", "4", "unverified"],
        ["step", "6", "damaged"],
        ["step", "8", "leftover"],
    ]
    assert "pinned" in lines[0]
    assert "score 1.25" in lines[1]
    assert "meta.json is missing" in lines[2]
    call("show", run.path)
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith(f"{run.path}: text, stopped")
    assert told[-5:] == ["  checkpoints:", *(f"    {line}" for line in lines)]
    call("show", run.path, "--json")
    tree = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [entry["pinned"] for entry in tree] == [True, False, False, False]
    assert tree[1]["score"] == 1.25
    assert tree[1]["bytes"] > 1000


def test_verify_reads_the_newest_or_all_of_them(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(run, 4)
    call("verify", run.path)
    assert capsys.readouterr().out.split()[:3] == ["step", "6", "whole"]
    with pytest.raises(UserError, match="1 of 3 checkpoints") as caught:
        call("verify", run.path, "--all")
    assert "(step 4)" in str(caught.value)
    assert caught.value.exit_code == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == ["whole", "damaged", "whole"]
    assert "fails its checksum" in lines[1]


@pytest.mark.parametrize("name", ["{run}@4", "{run}/checkpoints/step-00000004"])
def test_one_can_be_named(run: RunDir, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    spoil(run, 6)
    call("verify", name.format(run=run.path))
    assert capsys.readouterr().out.split()[:3] == ["step", "4", "whole"]
    spoil(run, 4)
    with pytest.raises(UserError, match="1 of 1"):
        call("verify", name.format(run=run.path), "--json")
    tree = json.loads(capsys.readouterr().out)
    assert (tree[0]["state"], tree[0]["step"]) == ("damaged", 4)


def test_a_copy_under_any_name_can_be_verified(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run.checkpoints / "step-00000004", tmp_path / "best")
    call("verify", tmp_path / "best")
    assert capsys.readouterr().out.split()[:3] == ["step", "4", "whole"]


def test_a_folder_of_checkpoints_is_enough(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    call("verify", run.checkpoints, "--all")
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_pinning_keeps_and_unpinning_lets_go(run: RunDir) -> None:
    call("pin", run.checkpoints / "step-00000002")
    retain(run.checkpoints, CheckpointConfig(keep=1))
    assert [path.name for path in list_checkpoints(run.checkpoints)] == [
        "step-00000002",
        "step-00000006",
    ]
    call("pin", f"{run.path}@2", "--off")
    retain(run.checkpoints, CheckpointConfig(keep=1))
    assert [path.name for path in list_checkpoints(run.checkpoints)] == ["step-00000006"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["verify", "{run}/nowhere"], "does not exist"),
        (["verify", "{run}@3"], "no checkpoint of step 3; there are: 2, 4, 6"),
        (["pin", "{run}@3"], "no checkpoint of step 3"),
        (["pin", "{run}"], "RUN@STEP"),
        (["pin", "{run}@2", "--off"], "not pinned"),
        (["show", "{run}/run.json"], "not a run"),
        (["show", "nothing://x"], "scheme that is not known"),
    ],
)
def test_a_mistake_is_one_sentence(run: RunDir, words: list[str], named: str) -> None:
    with pytest.raises(UserError) as caught:
        call(*(word.format(run=run.path) for word in words))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_that_never_saved_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir(tmp_path / "new")
    run.path.mkdir()
    run.write_info({"chat": False, "status": "running", "parent": None})
    call("show", run.path)
    assert "no checkpoints yet" in capsys.readouterr().out
    with pytest.raises(UserError, match="no checkpoints yet"):
        call("verify", run.path)


def test_a_store_that_is_not_there_hides_no_run(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run.config_path.write_text("checkpoint: {folder: 'nothing://x'}\n")
    call("show", run.path)
    out = capsys.readouterr().out
    assert out.startswith(f"{run.path}: text")
    assert "its checkpoints cannot be listed: " in out
