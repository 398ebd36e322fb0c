"""Losses of small runs, pinned: a change of mathematics anywhere shows up here first.

Pinned to six digits, because other CPUs add up in another order; compare_commits.py compares bits.
Recompute with: python -m tests.golden.losses
"""

from pathlib import Path

import pytest

from tests.golden.losses import CONFIGS, losses
from tests.village import Village

GOLDEN = {
    "adamw": [6.012925, 6.072247, 5.956633, 5.944501, 5.869101, 5.862471, 5.792142, 5.794808],
    "muon, windows, softcap": [
        6.023885,
        5.875497,
        5.531253,
        5.406833,
        5.194046,
        5.079416,
        4.939905,
        4.85039,
    ],
    "8-bit, accumulation, recompute": [
        6.044198,
        5.999807,
        5.957415,
        5.894499,
        5.853408,
        5.836996,
        5.733841,
        5.754233,
    ],
    "buckets, GPT-2 shape, dropout": [
        5.979755,
        5.996175,
        5.980854,
        5.84986,
        5.785524,
        5.72856,
        5.688323,
        5.71879,
    ],
    "fine-tuning, two sources, masked documents": [
        5.670528,
        5.607038,
        5.672,
        5.65073,
        5.459176,
        5.506232,
        5.506566,
        5.477417,
    ],
    "phases, concat, grouped queries, tied": [
        6.009941,
        6.003851,
        5.940778,
        5.935315,
        5.800659,
        5.82912,
        5.824857,
        5.782664,
    ],
}


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_are_the_pinned_ones(name: str, village: Village, tmp_path: Path) -> None:
    assert losses(name, village, tmp_path / "run") == pytest.approx(GOLDEN[name], rel=1e-5)
