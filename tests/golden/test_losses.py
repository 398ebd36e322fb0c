"""Losses of a small run, pinned: a change of mathematics anywhere shows up here first.

Pinned to six digits, because other CPUs add up in another order; resume tests compare bits.
Recompute with: FOUNDLING_PIN=1 pytest tests/golden -s
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from foundling.config import RunConfig
from foundling.runtime import RunDir
from foundling.runtime.rundir import read_lines
from foundling.train.loop import train

GOLDEN: list[float] = [6.012925, 6.072247, 5.956633, 5.944501, 5.8691, 5.862471, 5.792142, 5.794808]


def test_losses_are_the_pinned_ones(tiny: RunConfig, tmp_path: Path) -> None:
    train(replace(tiny, eval=replace(tiny.eval, every=0)), RunDir(tmp_path / "run"))
    losses = [line["loss"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    if os.environ.get("FOUNDLING_PIN"):
        print("GOLDEN: list[float] =", [round(loss, 6) for loss in losses])
    assert losses == pytest.approx(GOLDEN, rel=1e-5)
