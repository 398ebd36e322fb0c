"""What `foundling train` makes of its surroundings, before any process is started."""

import os
from pathlib import Path

import pytest

from foundling.config.errors import ConfigError, RunError
from foundling.config.load import dump_yaml
from foundling.config.run import RunConfig
from foundling.launch import train_job
from foundling.launch.detach import follow_log, show_log, state_of, stop
from foundling.launch.launcher import LaunchSpec, in_this_process, newest_step
from foundling.launch.logs import log_name, new_launch, newest_log, require_log, tail
from foundling.launch.train_job import branch_of, launch_train
from foundling.runtime.lock import RunLock
from foundling.runtime.run_dir import RunDir


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[LaunchSpec]:
    """What would have been launched."""
    found: list[LaunchSpec] = []
    monkeypatch.setattr(train_job, "launch", found.append)
    for name in ("RANK", "SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_one_process_trains_itself_and_more_are_launched(
    tiny: RunConfig, tmp_path: Path, jobs: list[LaunchSpec]
) -> None:
    text = dump_yaml(tiny)
    assert launch_train(tiny, tmp_path / "run") is False
    assert launch_train(tiny, tmp_path / "run", nproc=1) is False
    assert jobs == []
    assert launch_train(tiny, tmp_path / "run", nproc=3, restarts=0) is True
    assert (jobs[0].processes, jobs[0].restarts, jobs[0].settings) == (3, 0, text)
    assert launch_train(tiny, tmp_path / "run", nproc=1, restarts=2) is True
    assert not (tmp_path / "run").exists()


def test_a_rank_joins_and_refuses_what_would_be_ignored(
    tiny: RunConfig, tmp_path: Path, jobs: list[LaunchSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert launch_train(tiny, tmp_path) is False
    for option in ({"nproc": 2}, {"detach": True}, {"restarts": 1}):
        with pytest.raises(ConfigError, match=f"--{next(iter(option))} has no effect"):
            launch_train(tiny, tmp_path, **option)  # type: ignore[arg-type]


def test_a_rank_dies_with_a_torchrun_that_is_not_ours(
    tiny: RunConfig, tmp_path: Path, jobs: list[LaunchSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.setattr(train_job, "die_with_parent", found.append)
    monkeypatch.setenv("RANK", "1")
    launch_train(tiny, tmp_path)
    assert found == [], "srun ends its tasks itself"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    launch_train(tiny, tmp_path)
    assert found == [os.getppid()]
    monkeypatch.setenv("FOUNDLING_OUTCOMES", str(tmp_path))
    launch_train(tiny, tmp_path)
    assert len(found) == 1, "our own worker has done it"


def test_mistakes_are_found_before_anything_is_started(
    tiny: RunConfig, tmp_path: Path, jobs: list[LaunchSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    from foundling.config.load import load_config

    plan = {"measured": {"steps": 20}}
    RunDir(tmp_path / "done").write_info({"status": "finished", "parent": None, "plan": plan})
    for nproc in (1, 2):  # one process refuses before torch is imported
        with pytest.raises(ConfigError, match=r"data\.sources is empty; build .* --data.sources"):
            launch_train(load_config("hamlet"), tmp_path / "new", nproc=nproc)
        with pytest.raises(RunError, match=r"finished at step 20; .* --from .*/done@20 --train"):
            launch_train(tiny, tmp_path / "done", nproc=nproc)
    monkeypatch.setenv("SLURM_JOB_ID", "4")
    with pytest.raises(ConfigError, match="--detach"):
        launch_train(tiny, tmp_path / "new", detach=True)
    assert jobs == []


def test_from_names_a_run_and_a_step(tiny: RunConfig, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "parent")
    run.write_info({"status": "finished", "parent": None})
    (run.checkpoints / "step-00000300").mkdir(parents=True)
    found = branch_of(f"{run.path}@300")
    assert found.child == tmp_path / "parent-from-300"
    child = found.settings_of_child(tiny)
    assert (child.train.start, child.train.is_branch) == (f"{run.path}@300", True)
    for wrong, named in [("parent", "names no step"), ("parent@4", "there are: 300")]:
        with pytest.raises((ConfigError, RunError), match=named):
            branch_of(str(tmp_path / wrong))
    with pytest.raises(RunError, match="does not exist"):
        branch_of(str(tmp_path / "nowhere@3"))


def test_the_output_of_one_process_is_kept_once_the_run_is_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with in_this_process(tmp_path / "run"):
        print("refused")
    assert not (tmp_path / "run").exists(), "a refused command leaves nothing behind"
    with in_this_process(tmp_path / "run"), RunLock(tmp_path / "run"):
        print("\x1b[33mstep 1\x1b[0m")
    assert capsys.readouterr().out == "refused\n\x1b[33mstep 1\x1b[0m\n"
    log = newest_log(tmp_path / "run")
    assert log is not None
    assert log.read_text() == "step 1\n"


def test_logs_by_rank_and_the_newest_first(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    for number, name in enumerate(("20260101-000000-9", "20250101-000000-8")):
        folder = new_launch(tmp_path, name, {}) / f"try-{number}"
        folder.mkdir()
        (folder / log_name(0)).write_text(f"launch {number}\n")
    assert newest_log(tmp_path) == folder / log_name(0), "by when it began, not by its name"
    show_log(tmp_path)
    assert capfdbinary.readouterr().out == b"launch 1\n"
    with pytest.raises(RunError, match="ranks 0 to 0"):
        require_log(tmp_path, 3)
    (tmp_path / "other").mkdir()
    with pytest.raises(RunError, match="no logs yet"):
        follow_log(tmp_path / "other")
    with pytest.raises(RunError, match=r"nope does not exist; .foundling runs list."):
        follow_log(tmp_path / "nope")
    (tmp_path / "long").write_text("".join(f"line {n}\n" for n in range(1000)))
    assert tail(tmp_path / "long", 20) == b"line 998\nline 999\n"


def test_a_run_that_is_not_running_says_how_far_it_is(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with pytest.raises(RunError, match="does not exist"):
        stop(run.path, 1, kill=False)
    run.write_info({"status": "running", "parent": None})
    assert "before its first checkpoint" in state_of(run.path)
    for step in (9, 10):
        (run.checkpoints / f"step-{step}").mkdir(parents=True)
    (run.checkpoints / "step-11.tmp-3").mkdir()
    assert newest_step(run.path) == 10
    assert "not running" in stop(run.path, 1, kill=False)
    assert "saved at step 10" in state_of(run.path)
    with RunLock(run.path):
        assert "is running, held by process" in state_of(run.path)
    run.update_info(status="finished")
    assert "finished at step 10" in state_of(run.path)
