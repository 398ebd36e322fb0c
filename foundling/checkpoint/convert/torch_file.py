"""torch.save files, as a container of tensors and as a source of their own.

Always `weights_only`: torch then builds tensors and plain values and nothing else, and a pickle
that names anything more is refused before it runs. Files are mapped, not read, so that a tensor
costs memory when it is used.

    {"model": {...}, "foundling": {...}, "tokenizer": {...}}     ours: one file with everything
    {"model" | "state_dict" | "model_state_dict" | "module" | "app": {...}}
    {name: tensor}                                               by anybody's names
"""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foundling.checkpoint.tensor_index import TensorSpec
from foundling.config import CheckpointError

INSIDE = ("model", "state_dict", "model_state_dict", "module", "app")
WRAPPINGS = ("_orig_mod.", "module.")


def load_torch(file: Path) -> Any:
    """What a torch.save file holds: tensors and plain values, or a refusal."""
    try:
        return _load(file)
    except pickle.UnpicklingError as error:
        named = _named(" ".join(str(error).split()))
        if not named:
            raise CheckpointError(f"{file} cannot be read as a torch.save file.") from None
        raise CheckpointError(
            f"{file} is refused: it holds more than tensors and plain values, and loading it could"
            f" run code (it names {named}); save its state dict alone."
        ) from None
    except Exception as error:  # damaged bytes may raise anything
        raise CheckpointError(
            f"{file} cannot be read as a torch.save file ({' '.join(str(error).split())[:200]})."
        ) from None


def _load(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):  # files from before torch 1.6 cannot be mapped
            raise
        return torch.load(file, map_location="cpu", weights_only=True)


def _named(message: str) -> str:
    """The name that a pickle asked for, out of torch's page of advice; empty if it asked none."""
    for mark in ("GLOBAL ", "Unsupported global: "):
        if mark in message:
            return message.split(mark, 1)[1].split()[0].strip("`.,")
    return ""


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of a tree of dicts, by dotted names; what is no tensor is passed over."""
    if isinstance(tree, Tensor):
        yield prefix, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from flat(value, f"{prefix}.{key}" if prefix else str(key))


class Tensors:
    """Tensors that are there already, as a container; names lose what wrappers put on them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {_unwrapped(name): tensor for name, tensor in tensors.items()}
        self._specs = {
            name: TensorSpec(tuple(tensor.shape), tensor.dtype)
            for name, tensor in self._tensors.items()
        }

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Shape and dtype of each tensor."""
        return self._specs

    def read(self, name: str) -> Tensor:
        """One tensor."""
        return self._tensors[name]


class TorchFiles(Tensors):
    """The tensors of one or more files that hold a state dict each."""

    def __init__(self, files: Sequence[Path]) -> None:
        found: dict[str, Tensor] = {}
        for file in files:
            for name, tensor in flat(load_torch(file)):
                if name in found:
                    raise CheckpointError(f"{file} holds {name}, which another file holds too.")
                found[name] = tensor
        super().__init__(found)


def _unwrapped(name: str) -> str:
    for wrapping in WRAPPINGS:
        name = name.replace(wrapping, "")
    return name
