"""What "the same run" means: weights and the exact columns of metrics.jsonl, bit for bit."""

from pathlib import Path
from typing import Any

import torch

from foundling.checkpoint.paths import find_checkpoint
from foundling.checkpoint.reader import load_tensors, tensor_specs
from foundling.runtime.run_dir import RunDir, read_lines

EXACT = ("step", "loss", "lr", "grad_norm", "tokens", "targets", "positions", "sources")


def columns(run: Path) -> list[list[Any]]:
    """The columns that must be identical; paths of sources are shortened to their names."""
    rows = []
    for line in read_lines(RunDir(run).metrics_path):
        row = [line[name] for name in EXACT[:-1]]
        rows.append([*row, {Path(name).name: n for name, n in line["sources"].items()}])
    return rows


def state(run: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of the newest checkpoint."""
    _, checkpoint = find_checkpoint(run)
    tensors = {
        name: torch.empty(spec.shape, dtype=spec.dtype)
        for name, spec in tensor_specs(checkpoint).items()
    }
    load_tensors(checkpoint, tensors)
    return tensors


def assert_same_run(one: Path, other: Path) -> None:
    """Raise unless the two runs did the same thing."""
    assert columns(one) == columns(other)
    left, right = state(one), state(other)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
