"""What a launcher refuses before it starts anything, and that it leaves nothing behind then."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from foundling.config.errors import ConfigError, DataError, RunError, UserError
from foundling.config.parallel import ParallelConfig
from foundling.config.run import RunConfig
from foundling.launch import detach, train_job
from foundling.launch.detach import follow_log
from foundling.launch.launcher import LaunchSpec, _end_sentence, _sentence, removed_if_unbegun
from foundling.launch.logs import log_name, new_launch, note_end
from foundling.launch.train_job import launch_train
from foundling.runtime.exits import EndOfRun, Exit, RankOutcome
from foundling.runtime.lock import RunLock
from foundling.runtime.run_dir import RUN_SCHEMA, RunDir
from foundling.train.loop import train


def without_data(config: RunConfig) -> RunConfig:
    return config.replace(data={"sources": {"nowhere/at-all": 1.0}})


def laid_out(**degrees: int) -> Callable[[RunConfig], RunConfig]:
    return lambda config: config.replace(parallel=ParallelConfig(**degrees))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        (without_data, DataError, "nowhere/at-all"),
        (laid_out(shard=3), ConfigError, "does not divide 2 processes"),
        (laid_out(shard=4), ConfigError, "does not divide 2 processes"),
        (laid_out(replicate=3), ConfigError, "the job has 2 processes"),
    ],
)
@pytest.mark.parametrize("is_detached", [False, True])
def test_a_refusal_starts_nothing_and_leaves_nothing(
    change: Callable[[RunConfig], RunConfig],
    error: type[UserError],
    told: str,
    is_detached: bool,
    tiny: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train_job, "launch", pytest.fail)
    monkeypatch.setattr(detach, "_spawn", pytest.fail)
    config = change(tiny)
    with pytest.raises(error, match=told):
        launch_train(config, tmp_path / "run", nproc=2, detach=is_detached)
    assert not (tmp_path / "run").exists()


def test_a_held_run_is_not_detached_a_second_time(tiny: RunConfig, tmp_path: Path) -> None:
    with RunLock(tmp_path / "run"), pytest.raises(RunError, match="in use by process"):
        launch_train(tiny, tmp_path / "run", detach=True)


def test_what_needs_several_processes_is_refused_of_one(tiny: RunConfig, tmp_path: Path) -> None:
    for parallel, named in ((ParallelConfig(reduce_dtype="bf16"), "reduce_dtype"),):
        config, run = tiny.replace(parallel=parallel), RunDir(tmp_path / named)
        with pytest.raises(ConfigError, match=rf"parallel\.{named} has no effect with one process"):
            train(config, run)
        assert not run.exists
        with pytest.raises(ConfigError, match=named):
            launch_train(config, run.path, nproc=1, restarts=0)


def test_only_a_run_that_never_began_is_cleared(tmp_path: Path) -> None:
    new, begun, old = (tmp_path / name for name in ("new", "begun", "old"))
    old.mkdir()
    launch = starts("begun", then=ConfigError("no."))
    for run in (new, begun, old):
        with pytest.raises(ConfigError):
            launch(run)
    assert not new.exists()
    assert (begun / "logs" / "one").is_dir()
    assert (old / "logs" / "one").is_dir(), "it was there before"
    with pytest.raises(EndOfRun):
        starts(then=EndOfRun(Exit.CRASH, "read the log"))(new)
    assert (new / "logs" / "one").is_dir()


@pytest.mark.parametrize(
    ("name", "is_ours"),
    [
        ("tokenizer.json", False),
        ("config.yaml", False),
        ("metrics.jsonl", False),
        ("run.json", False),
        ("logs/one/launch.json", True),
        ("bad_nodes", True),
    ],
)
def test_a_run_begins_in_a_folder_of_its_own(
    name: str, is_ours: bool, tiny: RunConfig, tmp_path: Path
) -> None:
    run, file = RunDir(tmp_path / "folder"), tmp_path / "folder" / name
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    if is_ours:
        run.refuse_other_files()
        return
    told = "has schema None" if name == "run.json" else f"is no run and holds {name}"
    with pytest.raises(RunError, match=told):
        train(tiny, run)
    for is_detached in (False, True):
        with pytest.raises(RunError, match=told):
            launch_train(tiny, run.path, nproc=2, detach=is_detached)
    assert file.read_text() == "{}"
    assert [path.name for path in run.path.iterdir()] == [name]


def test_a_start_that_was_cut_off_before_run_json_goes_on(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with RunLock(run.path):
        run.config_path.write_text("model: {}\n")
    run.refuse_other_files()
    (run.path / "manifest.json").write_text("{}")
    with pytest.raises(RunError, match=r"holds manifest\.json"):
        run.refuse_other_files()


def starts(*words: str, then: Exception) -> Callable[[Path], None]:
    """A launch that gets as far as its lock, and the run's first word if it is among `words`."""

    def work(run: Path) -> None:
        with removed_if_unbegun(run):
            new_launch(run, "one", {})
            with RunLock(run):
                if run.name in words:
                    RunDir(run).write_info({"status": "running"})
                raise then

    return work


children: list["subprocess.Popen[bytes]"] = []


def child(text: str) -> Callable[[list[str], Path], "subprocess.Popen[bytes]"]:
    """Stands for the detached launcher."""

    def spawn(words: list[str], log: Path) -> "subprocess.Popen[bytes]":
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as out:
            process = subprocess.Popen([sys.executable, "-c", text], stdout=out, stderr=out)
        children.append(process)
        return process

    return spawn


def test_a_detached_run_is_waited_for_until_it_begins(
    tiny: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    late = "import time; time.sleep(0.3); print('foundling: no room.'); raise SystemExit(2)"
    monkeypatch.setattr(detach, "_spawn", child(late))
    with pytest.raises(EndOfRun, match="no room") as caught:
        launch_train(tiny, run, detach=True)
    assert caught.value.code == Exit.USER
    assert not run.exists()
    info = json.dumps({"schema": RUN_SCHEMA, "status": "running"})
    begins = f"open({str(run / 'run.json')!r}, 'w').write({info!r});"
    begins += f"open({str(run / 'events.jsonl')!r}, 'w').write('x'); import time; time.sleep(20)"
    monkeypatch.setattr(detach, "_spawn", child(begins))
    launch_train(tiny, run, detach=True)
    assert children[-1].poll() is None, "it was waited for to its end"
    assert "goes on in the background" in capsys.readouterr().out
    monkeypatch.setattr(detach, "STARTING_S", 0.1)
    monkeypatch.setattr(detach, "_spawn", child("import time; time.sleep(100)"))
    launch_train(tiny, run, detach=True)
    assert "has not begun yet" in capsys.readouterr().out
    while children:
        children[-1].kill()
        children.pop().wait()


def test_following_tells_how_a_run_has_ended(tmp_path: Path) -> None:
    folder = new_launch(tmp_path, "one", {})
    (folder / "try-0").mkdir()
    (folder / "try-0" / log_name(0)).write_text("some words\n")
    follow_log(tmp_path)
    note_end(folder, Exit.REQUEUE, "saved")
    follow_log(tmp_path)
    note_end(folder, Exit.USER, "nowhere has no manifest")
    with pytest.raises(EndOfRun, match="ended with code 2: nowhere has no manifest") as caught:
        follow_log(tmp_path)
    assert caught.value.code == Exit.USER


def test_a_refusal_is_said_once_and_ends_in_one_stop(tmp_path: Path) -> None:
    job = LaunchSpec(run=tmp_path, processes=2, command=("x",))
    refused = RankOutcome(0, Exit.USER, "no such thing.", "here", 1)
    assert _end_sentence(job, refused) == "", "rank 0 has said it"
    other = replace(refused, rank=1)
    assert _sentence(other) == "rank 1 on here: no such thing"
    assert ".;" not in _end_sentence(job, other)
