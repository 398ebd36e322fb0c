"""The scale of the loss in fp16, whose smallest gradients would vanish without one.

A step whose gradients overflow is taken again from the same batch at half the scale: nothing is
lost, nothing is skipped, and a replay does the same. Rejected: torch's GradScaler, which drops the
batch and counts the step.
"""

from dataclasses import asdict, dataclass
from typing import Any

FIRST = 2.0**16
SMALLEST = 1.0
LARGEST = 2.0**24


@dataclass
class LossScale:
    """A power of two, and how long it has held."""

    value: float = FIRST
    held: int = 0
    """Steps since it last changed."""
    patience: int = 2000
    """Steps that it holds before it is doubled."""

    def overflowed(self) -> bool:
        """Halve it; False where it cannot be any smaller."""
        if self.value <= SMALLEST:
            return False
        self.value, self.held = self.value / 2, 0
        return True

    def took_a_step(self) -> None:
        """Count one more, and double the scale once in a while."""
        self.held += 1
        if self.held >= self.patience:
            self.value, self.held = min(self.value * 2, LARGEST), 0

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint keeps it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "LossScale":
        """The inverse of to_json."""
        return cls(**data)
