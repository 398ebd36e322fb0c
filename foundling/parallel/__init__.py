"""The mesh from degrees, and THE order in which a model is made parallel."""

from foundling.parallel.apply import accumulating, apply_parallel, is_fsdp1, whole_weights
from foundling.parallel.losses import LossModule, plain_loss
from foundling.parallel.mesh import ALONE, Mesh, make_mesh
from foundling.parallel.recompute import apply_recompute

__all__ = [
    "ALONE",
    "LossModule",
    "Mesh",
    "accumulating",
    "apply_parallel",
    "apply_recompute",
    "is_fsdp1",
    "make_mesh",
    "plain_loss",
    "whole_weights",
]
