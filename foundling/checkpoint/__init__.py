"""Checkpoints: {name: tensor} and JSON, whole or not there; and bundles, ready to use."""

from foundling.checkpoint.bundle import Bundle, find_checkpoint, load_bundle
from foundling.checkpoint.folders import list_checkpoints, step_of
from foundling.checkpoint.keep import latest, retain
from foundling.checkpoint.seal import verify
from foundling.checkpoint.store import load_meta, load_tensors, save, tensor_specs
from foundling.checkpoint.tensor_index import TensorSpec

__all__ = [
    "Bundle",
    "TensorSpec",
    "find_checkpoint",
    "latest",
    "list_checkpoints",
    "load_bundle",
    "load_meta",
    "load_tensors",
    "retain",
    "save",
    "step_of",
    "tensor_specs",
    "verify",
]
