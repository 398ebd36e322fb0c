"""A run that is killed after its fifth step and goes on, beside one that is left alone."""

from pathlib import Path

import pytest
import torch

from foundling.checkpoint.bundle import load_bundle
from foundling.config.run import RunConfig
from foundling.runtime.run_dir import RunDir
from foundling.train import loop, step
from foundling.train.loop import train


class Killed(BaseException):
    """Stands for a kill: nothing on the way catches it."""


def assert_goes_on_to_the_same_bits(
    config: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every weight of the two is equal in the end."""
    train(config, RunDir(folder / "whole"))
    real = step.train_step

    def deadly(state, *args, **kwargs):  # type: ignore[no-untyped-def]
        result = real(state, *args, **kwargs)
        if state.step == 5:
            raise Killed
        return result

    run = RunDir(folder / "killed")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", deadly)
        with pytest.raises(Killed):
            train(config, run)
    torch._dynamo.reset()  # another process compiles again
    train(config, run)
    one, other = (load_bundle(folder / name).model for name in ("whole", "killed"))
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
