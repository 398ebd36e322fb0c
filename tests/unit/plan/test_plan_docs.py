"""Every command in docs/plan.md's tables runs, and its published table is the one that is made."""

import re
import shlex
from pathlib import Path

import pytest

from foundling.cli.main import run_verb
from tests.unit.plan.published import main

DOCS = (Path(__file__).parents[3] / "docs" / "plan.md").read_text()
COMMANDS = sorted(set(re.findall(r"`(plan [a-z][^`]*)`", DOCS)))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_documented_command_runs(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_verb(shlex.split(command))
    assert "parameters" in capsys.readouterr().out


def test_the_published_table_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    for line in capsys.readouterr().out.strip().splitlines():
        assert line in DOCS


def test_there_are_commands_for_every_account() -> None:
    assert len(COMMANDS) >= 14
    for preset in ("clm-60m", "llama3.1-8b", "qwen2-0.5b-gpt2", "tinygpt-524m", "llama-1.24b"):
        assert any(preset in command for command in COMMANDS)
