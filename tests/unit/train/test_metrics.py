"""Where the numbers go: the file, W&B under one id, and the screen."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foundling.config.run import RunConfig
from foundling.runtime.run_dir import RunDir
from foundling.train import loop
from foundling.train import step as step_module
from foundling.train.loop import train
from foundling.train.metrics import ProgressDisplay


class FakeWandb:
    """Speaks wandb's protocol and writes down what it was told."""

    __spec__ = object()  # found by find_spec, as an installed one is

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.logged: list[int] = []
        self.finished = 0

    def init(self, **settings: Any) -> Any:
        self.started.append(settings)

        def log(values: dict[str, float], step: int) -> None:
            assert "loss" in values or any(name.startswith("eval/") for name in values)
            self.logged.append(step)

        def finish() -> None:
            self.finished += 1

        return SimpleNamespace(id=settings["id"], log=log, finish=finish)


class Killed(BaseException):
    """Stands for kill -9 inside one process."""


def test_one_wandb_run_across_resumes(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = tiny.replace(log={"wandb": "offline", "project": "mine"})
    run = RunDir(tmp_path / "run")
    real = step_module.train_step

    def deadly(state: Any, *args: Any, **kwargs: Any) -> Any:
        if state.step == 5:
            raise Killed
        return real(state, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", deadly)
        with pytest.raises(Killed):
            train(config, run)
    train(config, run)
    first, second = fake.started
    assert first["id"] == second["id"] == run.read_info()["wandb_id"]
    assert (first["project"], first["mode"], second["resume"]) == ("mine", "offline", "allow")
    assert set(fake.logged) == set(range(1, 9))
    assert fake.finished == 2


def test_a_plain_line_on_the_clock_says_how_long_is_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from foundling.runtime import console

    console.console.cache_clear()
    screen = ProgressDisplay(total_steps=10, done=4)
    line = {"step": 5, "loss": 1.5, "lr": 0.1, "grad_norm": 2.0, "tokens_per_s": 1000.0}
    screen.show(line, due=False)
    screen.show({**line, "step": 6}, due=True)
    screen.close()
    console.console.cache_clear()
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1
    assert said[0].startswith("step 6/10  loss 1.5000")
    assert said[0].endswith("s left")
