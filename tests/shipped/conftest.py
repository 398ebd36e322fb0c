"""A small finished life that tests of commands share."""

from pathlib import Path

import pytest

from foundling.cli.main import run_verb


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny demo, walked once."""
    folder = tmp_path_factory.mktemp("life") / "demo"
    run_verb(["demo", "--scale", "tiny", "--seed", "1", "--folder", str(folder)])
    return folder
