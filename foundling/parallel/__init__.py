"""Parallelism, applied to a plain model from outside."""

from foundling.parallel.apply import LossModule, apply_parallel

__all__ = ["LossModule", "apply_parallel"]
