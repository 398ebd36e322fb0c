"""What tests of the planner share: a command's words, and a study by a few names."""

from typing import Any

import pytest

from foundling.cli.main import run_verb
from foundling.config.load import load_config
from foundling.plan.forecast import PlanOnHardware, PlanOptions, study

OPEN = {"train.batch-size": "auto", "parallel.recompute": "auto"}


def said(capsys: pytest.CaptureFixture[str], command: str) -> str:
    """What a command prints."""
    capsys.readouterr()
    run_verb(command.split())
    return capsys.readouterr().out


def plan(
    target: str, gpu: str, settings: dict[str, Any] | None = None, **asked: Any
) -> PlanOnHardware:
    """A target on one kind of GPU."""
    return study(load_config(target, settings), gpu, PlanOptions(**asked))
