"""A GPU whose memory runs out: one sentence where no step ever fitted, a crash where steps had."""

from pathlib import Path
from typing import Any

import pytest
import torch
from run_tools import train_until

from foundling.cli import main
from foundling.config.errors import RunError
from foundling.config.load import dump_yaml
from foundling.config.run import RunConfig
from foundling.runtime.run_dir import RunDir
from foundling.train import loop
from foundling.train.oom import OutOfMemoryLaterError, refuse_on_oom, snapshot_on_oom


def run_out_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory for the step after `step`."""
    real = loop.train_step

    def greedy(state: Any, *args: Any, **kwargs: Any) -> Any:
        if state.step == step:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(state, *args, **kwargs)

    monkeypatch.setattr(loop, "train_step", greedy)


def ended(config: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    given = folder / "run.yaml"
    given.write_text(dump_yaml(config))
    return main._run_and_report_exit(["train", str(given), "--run", str(folder / "run")])


def test_a_first_step_that_does_not_fit_is_refused(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_out_at(0, monkeypatch)
    code, sentence = ended(tiny, tmp_path, monkeypatch)
    assert code == 2
    rows, width = tiny.train.batch_size, tiny.train.seq_len
    assert f"a step of {rows} rows of {width} tokens does not fit" in sentence
    assert "lower train.batch_size" in sentence


def test_memory_that_runs_out_later_is_a_crash(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher starts it again from the last checkpoint."""
    run_out_at(3, monkeypatch)
    with (
        pytest.raises(
            OutOfMemoryLaterError, match="after steps that had fitted: CUDA out of memory"
        ),
        refuse_on_oom(tiny.train),
        snapshot_on_oom(tmp_path),
    ):
        loop.train(tiny, RunDir(tmp_path / "run"))


def test_the_first_step_of_a_resume_had_fitted_once(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train_until(tiny, RunDir(tmp_path / "run"), 5, monkeypatch)
    run_out_at(4, monkeypatch)
    with pytest.raises(OutOfMemoryLaterError), refuse_on_oom(tiny.train):
        loop.train(tiny, run)


def test_weights_that_do_not_fit_are_refused_too(tiny: RunConfig) -> None:
    with (
        pytest.raises(RunError, match="does not fit into the device's memory"),
        refuse_on_oom(tiny.train),
    ):
        raise torch.OutOfMemoryError("while the model was built")
