"""How far a kernel may be off: it is compared with the same mathematics in float64."""

from collections.abc import Sequence

from torch import Tensor

TOLERANCE = 3e-2
"""Largest relative error, in norm: bf16 has 1e-2 of it."""


def worst_gap(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Norm of the difference over the norm of what is right, of the worst of several tensors."""
    pairs = zip(found, wanted, strict=True)
    wide = ((f.detach().double(), w.detach()) for f, w in pairs)
    return max(float((f - w).norm() / w.norm().clamp(min=1e-30)) for f, w in wide)
