"""How `foundling train` ends, by docs/exits.md: the code, the sentence, and what is left behind."""

import errno
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from foundling.checkpoint import manager
from foundling.checkpoint.folders import list_checkpoints, step_of
from foundling.checkpoint.manager import CheckpointManager
from foundling.checkpoint.retention import latest
from foundling.cli import main
from foundling.config.load import dump_yaml
from foundling.config.run import RunConfig
from foundling.eval import bits_per_byte
from foundling.generate.engine import Engine
from foundling.runtime import files
from foundling.runtime.exits import Exit
from foundling.runtime.lock import is_locked, read_holder
from foundling.runtime.progress import PROGRESS
from foundling.runtime.run_dir import RunDir, read_lines
from foundling.runtime.run_reader import read_events
from foundling.train import loop
from foundling.train import step as step_module
from foundling.train.setup import DiskFailedError

KWDEFAULTS = bits_per_byte.held_out_bpb.__kwdefaults__
AT = 5
"""Steps after which something happens; the save before it is of step 4, which is evaluated."""


def in_step(patch: pytest.MonkeyPatch, run: Path, act: Callable[[], None]) -> None:
    """Do something when step AT has been taken."""
    real = loop.train_step

    def train_step(state: Any, *args: Any, **more: Any) -> Any:
        result = real(state, *args, **more)
        if state.step == AT:
            act()
        return result

    patch.setattr(loop, "train_step", train_step)


def told(*signals: signal.Signals) -> Callable[[pytest.MonkeyPatch, Path], None]:
    def send() -> None:
        for number in signals:
            os.kill(os.getpid(), number)

    return lambda patch, run: in_step(patch, run, send)


def always_nan(patch: pytest.MonkeyPatch, run: Path) -> None:
    real = step_module._accumulate

    def bad(state: Any, *args: Any) -> Any:
        total = real(state, *args)
        return total * math.nan if state.step >= AT else total

    patch.setattr(step_module, "_accumulate", bad)


def no_room(patch: pytest.MonkeyPatch, run: Path) -> None:
    """The disk is full from step AT on."""
    full: list[int] = []

    def at(point: str) -> None:
        if full and point == "write":
            raise OSError(28, "No space left on device")

    patch.setattr(files, "failpoint", at)
    in_step(patch, run, lambda: full.append(1))


def damaged(patch: pytest.MonkeyPatch, run: Path) -> None:
    """A run that was interrupted, and all of whose checkpoints were damaged since."""
    with pytest.MonkeyPatch.context() as first:
        told(signal.SIGTERM)(first, run)
        assert train(run)[0] == Exit.REQUEUE
    for folder in list_checkpoints(run / "checkpoints"):
        os.truncate(Path(folder) / "meta.json", 10)


@dataclass(frozen=True)
class Case:
    """What happens, and how the command must end."""

    code: Exit
    sentence: str
    happens: Callable[[pytest.MonkeyPatch, Path], None]
    saved: int | None
    """The newest whole checkpoint afterwards."""


def stopped(*signals: signal.Signals) -> Case:
    name = signals[0].name
    return Case(Exit.REQUEUE, f"saved at step {AT} after {name}; 3 steps are", told(*signals), AT)


CASES = {
    "SIGTERM": stopped(signal.SIGTERM),
    "SIGUSR1": stopped(signal.SIGUSR1),
    "SIGHUP": stopped(signal.SIGHUP),
    "SIGINT": stopped(signal.SIGINT),
    "SIGTERM twice": stopped(signal.SIGTERM, signal.SIGTERM),
    "a loss that stays bad": Case(
        Exit.NONFINITE, "the guard has stepped in 6 times", always_nan, 4
    ),
    "no room for the last save": Case(Exit.UNSAVED, "No space left on device", no_room, 4),
    "every checkpoint damaged": Case(Exit.DATA, "none of its checkpoints is whole", damaged, None),
}


def train(run: Path) -> tuple[int, str]:
    return main._run_and_report_exit(["train", str(run.parent / "run.yaml"), "--run", str(run)])


@pytest.mark.parametrize("name", CASES)
def test_train_ends_with_its_code_and_leaves_a_run_that_goes_on(
    name: str, tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, run = CASES[name], tmp_path / "run"
    if name == "SIGHUP" and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        pytest.skip("these tests run under nohup, which a run respects")
    # What was saved must not depend on how fast the disk is.
    config = tiny.replace(checkpoint={"background": False})
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    with monkeypatch.context() as patch:
        case.happens(patch, run)
        code, sentence = train(run)
    assert (code, case.sentence in sentence) == (case.code, True), (code, sentence)
    newest = latest(run / "checkpoints")
    assert (step_of(newest) if newest else None) == case.saved
    assert RunDir(run).read_info()["status"] == "running", "not finished, whatever it says"
    assert not is_locked(run)
    assert read_holder(run) is None, "the lock was given back"
    assert not [path for path in (run / "checkpoints").iterdir() if "tmp" in path.name]
    if name == "every checkpoint damaged":
        assert len(read_lines(run / "metrics.jsonl")) == AT, "nothing was begun anew"
        return
    if name == "a loss that stays bad":
        return  # going on from it is test_guarded_run's
    assert train(run) == (Exit.OK, "")
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == list(range(1, 9))
    assert RunDir(run).read_info()["status"] == "finished"
    code, sentence = train(run)
    assert (code, "is finished" in sentence) == (Exit.USER, True)


def test_the_last_save_is_made_up_for_where_an_old_one_hung(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save of step 6 hangs until the one of step 8, the last, was left out."""
    run, phases = tmp_path / "run", []
    monkeypatch.setattr(manager, "TIMEOUT_S", 1)
    config = tiny.replace(checkpoint={"every": 6})
    (tmp_path / "run.yaml").write_text(dump_yaml(config.replace(eval=tiny.eval.replace(every=8))))
    real_tell, real_finish, opened = (
        CheckpointManager._report,
        CheckpointManager.finish,
        threading.Event(),
    )

    def at(point: str) -> None:
        if point == "rename" and not opened.is_set():
            assert opened.wait(20)

    def tell(self: Any, result: Any, *rest: Any) -> None:
        real_tell(self, result, *rest)
        opened.set()

    def finish(self: Any, *step: Any) -> Any:
        phases.append(PROGRESS.phase)
        return real_finish(self, *step)

    monkeypatch.setattr(files, "failpoint", at)
    monkeypatch.setattr(CheckpointManager, "_report", tell)
    monkeypatch.setattr(CheckpointManager, "finish", finish)
    assert train(run) == (Exit.OK, "")
    newest = latest(run / "checkpoints")
    assert newest is not None
    assert (step_of(newest), phases) == (8, ["save"])
    left_out = [line for line in read_lines(run / "events.jsonl") if line["event"] == "not_saved"]
    assert [line["step"] for line in left_out] == [8]


def test_a_file_that_fails_a_run_which_had_begun_is_a_crash(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the user's mistake, which nothing would start again."""

    def stale() -> None:
        raise OSError(errno.ENOENT, "No such file or directory", "shard-00001.bin")

    run = tmp_path / "run"
    (tmp_path / "run.yaml").write_text(dump_yaml(tiny))
    with monkeypatch.context() as patch:
        in_step(patch, run, stale)
        with pytest.raises(DiskFailedError, match=r"shard-00001\.bin"):
            train(run)
    monkeypatch.setattr(loop, "set_up", lambda *_: Path("/none").read_text())
    code, sentence = train(run)
    assert (code, sentence) == (Exit.USER, "/none: No such file or directory.")


def test_a_disk_that_is_away_is_nobodys_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(argv: object, **_: object) -> int:
        raise OSError(errno.ESTALE, "Stale file handle", "run.json")

    monkeypatch.setattr(main, "run_verb", stale)
    with pytest.raises(OSError, match="Stale"):
        main._run_and_report_exit(["train"])


def test_a_closed_output_ends_nothing(tiny: RunConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "run.yaml").write_text(dump_yaml(tiny))
    words = ["train", str(tmp_path / "run.yaml"), "--run", str(run), "--log.every", "1"]
    command = [sys.executable, "-m", "foundling", *words]
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONPATH": str(Path(main.__file__).parents[2])}
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=environment)
    os.close(write)
    assert done.returncode == 0
    assert all(line.startswith(b"train: setting up") for line in done.stderr.splitlines())
    assert RunDir(run).read_info()["status"] == "finished"
    (log,) = run.glob("logs/*/try-0/*")
    assert "step 8/8" in log.read_text()


def evals(run: Path) -> list[int]:
    return [line["step"] for line in read_events(RunDir(run)).measured["evaluated"]]


def test_a_stop_at_the_last_step_leaves_its_evaluation_to_the_next_start(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    (tmp_path / "run.yaml").write_text(dump_yaml(tiny))
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[__name__], "AT", 8)
        told(signal.SIGTERM)(patch, run)
        code, sentence = train(run)
    said = "saved at step 8 after SIGTERM; the last score is missing; the same command goes on"
    assert (code, sentence) == (Exit.REQUEUE, said)
    assert RunDir(run).read_info()["status"] == "running"
    assert evals(run) == [4]
    assert train(run) == (Exit.OK, "")
    assert evals(run) == [4, 8]


def test_an_evaluation_is_given_up_when_told_to_stop_and_made_up_for(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real, batches = tmp_path / "run", Engine._run, []
    (tmp_path / "run.yaml").write_text(dump_yaml(tiny))

    def step(*args: Any) -> Any:
        batches.append(1)
        os.kill(os.getpid(), signal.SIGUSR1)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_run", step)
        patch.setattr(
            bits_per_byte.held_out_bpb, "__kwdefaults__", {**KWDEFAULTS, "max_tokens_per_batch": 9}
        )
        code, sentence = train(run)
    assert (code, sentence) == (
        Exit.REQUEUE,
        "saved at step 4 after SIGUSR1; 4 steps are left; the same command goes on",
    )
    assert len(batches) == 1
    assert (evals(run), (run / "tried.json").exists()) == ([], False)
    assert train(run) == (Exit.OK, "")
    assert evals(run) == [4, 8]
