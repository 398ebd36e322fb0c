"""From the command line to the optimizer in a few calls, counted in a step that really runs."""

import sys
from pathlib import Path

import pytest
import torch

from foundling.cli import main
from foundling.config.load import dump_yaml
from foundling.config.run import RunConfig

PACKAGE = Path(main.__file__).parents[1]
MOST = 5


def _frames_of_ours(outermost: str) -> list[str]:
    """Functions of the package on the stack of the caller, from the innermost to `outermost`."""
    names, frame = [], sys._getframe(2)
    while frame is not None:
        if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            names.append(frame.f_code.co_name)
            if names[-1] == outermost:
                return names
        frame = frame.f_back  # type: ignore[assignment]
    raise AssertionError(f"{outermost} is not on the stack: {names}")


def test_few_calls_lead_to_the_optimizers_own_step(
    tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.yaml").write_text(dump_yaml(tiny))
    seen: list[list[str]] = []
    real_step = torch.optim.AdamW.step

    def step(self: torch.optim.AdamW, *args: object) -> object:
        seen.append(_frames_of_ours("main"))
        return real_step(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    words = ["train", str(tmp_path / "run.yaml"), "--run", str(tmp_path / "run"), "--nproc", "1"]
    monkeypatch.setattr(sys, "argv", ["foundling", *words])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 0
    assert len(seen) == tiny.train.horizon_in("steps")
    for frames in seen:
        between = frames[:-1]  # both ends excluded: cli.main, and torch's own step
        assert len(between) <= MOST, between
