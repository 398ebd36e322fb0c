"""The small model and the small card of the bench's own tests."""

from tests.unit.bench.conftest import no_moments, small

__all__ = ["no_moments", "small"]
