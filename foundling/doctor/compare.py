"""What "the same run" means, in findings: losses, data and weights of two run directories.

Bit for bit where the device promises it. CUDA without train.deterministic does not: sums are then
added in another order each time, so numbers are compared within a stated tolerance, and what was
read is still compared exactly.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from foundling.checkpoint import find_checkpoint, load_meta, load_tensors, tensor_specs
from foundling.runtime.rundir import RunDir, read_lines

NUMBERS = ("loss", "grad_norm", "lr")
COUNTS = ("step", "positions", "tokens", "targets", "sources")
TOLERANCE = 0.02
"""Relative, for numbers of a device that adds in another order each time."""


@dataclass(frozen=True)
class Finding:
    """One thing that was compared."""

    what: str
    same: bool
    detail: str

    def __str__(self) -> str:
        return f"{self.what}: {'the same' if self.same else 'DIFFERENT'}, {self.detail}"


def compare_runs(one: RunDir, other: RunDir, *, exact: bool) -> list[Finding]:
    """Everything that must not depend on whether a run was stopped."""
    left, right = read_lines(one.metrics_path), read_lines(other.metrics_path)
    return [
        _losses(left, right, exact),
        _lines("steps and counts", _columns(left), _columns(right)),
        _lines("ledger", read_lines(one.ledger_path), read_lines(other.ledger_path)),
        _data_order(one, other),
        _weights(one, other, exact),
    ]


def _columns(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: line[name] for name in COUNTS} for line in lines]


def _losses(left: list[dict[str, Any]], right: list[dict[str, Any]], exact: bool) -> Finding:
    worst, where = 0.0, ""
    for one, other in zip(left, right, strict=False):
        for name in NUMBERS:
            gap = _gap(one[name], other[name])
            if gap > worst:
                worst, where = gap, f"{name} of step {one['step']}"
    what = f"losses of {len(left)} steps"
    return _verdict(what, worst, where, exact, all_there=len(left) == len(right))


def _gap(one: float, other: float) -> float:
    return 0.0 if one == other else abs(one - other) / max(abs(one), abs(other))


def _verdict(what: str, worst: float, where: str, exact: bool, all_there: bool = True) -> Finding:
    if not all_there:
        return Finding(what, False, "one run has more of them")
    if exact:
        return Finding(what, worst == 0, "bit for bit" if not worst else f"{where} by {worst:.1e}")
    detail = f"the largest difference is {worst:.1e} ({where})" if worst else "bit for bit"
    tolerated = f"{detail}; {TOLERANCE:g} is tolerated, train.deterministic is off"
    return Finding(what, worst <= TOLERANCE, tolerated)


def _lines(what: str, left: list[dict[str, Any]], right: list[dict[str, Any]]) -> Finding:
    for number, (one, other) in enumerate(zip(left, right, strict=False), start=1):
        if one != other:
            return Finding(what, False, f"line {number} is {one} and {other}")
    if len(left) != len(right):
        return Finding(what, False, f"{len(left)} lines and {len(right)}")
    return Finding(what, True, f"{len(left)} lines")


def _data_order(one: RunDir, other: RunDir) -> Finding:
    metas = [load_meta(find_checkpoint(run.path)[1]) for run in (one, other)]
    for name in ("step", "segments", "ledger"):
        if metas[0][name] != metas[1][name]:
            return Finding("data order", False, f"the checkpoints' {name} differ")
    return Finding("data order", True, f"{len(metas[0]['segments'])} segments")


def _weights(one: RunDir, other: RunDir, exact: bool) -> Finding:
    """Weights and moments of the last checkpoints, one tensor at a time in memory's order."""
    left, right = _tensors(one), _tensors(other)
    if left.keys() != right.keys():
        return Finding("weights and moments", False, "the checkpoints hold other tensors")
    worst, where = 0.0, ""
    for name, tensor in left.items():
        if torch.equal(tensor, right[name]):
            continue
        gap = float((tensor - right[name]).norm() / tensor.norm().clamp_min(1e-30))
        gap = gap if math.isfinite(gap) else math.inf
        if exact or name.startswith("model."):  # moments of a few steps are mostly noise
            worst, where = max((worst, where), (gap, name))
    count = sum(tensor.numel() for tensor in left.values())
    return _verdict(f"{count:,} weights and moments", worst, where, exact)


def _tensors(run: RunDir) -> dict[str, torch.Tensor]:
    _, checkpoint = find_checkpoint(run.path)
    tensors = {
        name: torch.empty(spec.shape, dtype=spec.dtype)
        for name, spec in tensor_specs(checkpoint).items()
    }
    load_tensors(checkpoint, tensors, check=False)
    return tensors
