"""A folder with two checkpoints."""

from pathlib import Path

import pytest
from checkpoint_samples import sample

from foundling.checkpoint import save


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Whole checkpoints of steps 9 and 10."""
    place = tmp_path / "checkpoints"
    for step in (9, 10):
        save(place, step, sample(step), {"step": step, "note": f"of {step}"})
    return place
