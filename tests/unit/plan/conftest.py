"""Plans of these tests rest on the table alone."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _nothing_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FOUNDLING_HOME", str(tmp_path))
    monkeypatch.delenv("FOUNDLING_HARDWARE", raising=False)
