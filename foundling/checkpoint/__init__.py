"""Checkpoints: {name: tensor} and JSON, whole or not there; and bundles, ready to use.

What brings DCP with it is imported when it is asked for: that takes a second, and most verbs only
look.
"""

import importlib
from typing import TYPE_CHECKING, Any

from foundling.checkpoint.bundle_paths import checkpoint_home, find_checkpoint
from foundling.checkpoint.convert.detect import kind_of, open_source
from foundling.checkpoint.folders import list_checkpoints, step_of
from foundling.checkpoint.keep import (
    Rules,
    latest,
    latest_together,
    pin,
    pinned,
    retain,
    scores,
    unpin,
)
from foundling.checkpoint.remote import Folder, RemotePath, open_folder
from foundling.checkpoint.seal import load_meta, verify
from foundling.checkpoint.survey import (
    Sighting,
    check_target,
    home_of_target,
    named_checkpoint,
    survey,
)
from foundling.checkpoint.tensor_index import TensorSpec

if TYPE_CHECKING:
    from foundling.checkpoint.bundle import Bundle, load_bundle, model_of
    from foundling.checkpoint.saver import Saver, SaveResult
    from foundling.checkpoint.store import checkpoint_bytes, load_tensors, save, tensor_specs

__all__ = [
    "Bundle",
    "Folder",
    "RemotePath",
    "Rules",
    "SaveResult",
    "Saver",
    "Sighting",
    "TensorSpec",
    "check_target",
    "checkpoint_bytes",
    "checkpoint_home",
    "find_checkpoint",
    "home_of_target",
    "kind_of",
    "latest",
    "latest_together",
    "list_checkpoints",
    "load_bundle",
    "load_meta",
    "load_tensors",
    "model_of",
    "named_checkpoint",
    "open_folder",
    "open_source",
    "pin",
    "pinned",
    "retain",
    "save",
    "scores",
    "step_of",
    "survey",
    "tensor_specs",
    "unpin",
    "verify",
]

_WITH_DCP = {
    **dict.fromkeys(("Bundle", "load_bundle", "model_of"), "bundle"),
    **dict.fromkeys(("Saver", "SaveResult"), "saver"),
    **dict.fromkeys(("checkpoint_bytes", "load_tensors", "save", "tensor_specs"), "store"),
}


def __getattr__(name: str) -> Any:
    if name not in _WITH_DCP:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WITH_DCP[name]}"), name)
