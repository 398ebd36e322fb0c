"""torch.save files, as a container of tensors and as a source of their own.

Always `weights_only`: torch then builds tensors and plain values and nothing else, and a pickle
that names anything more is refused before it runs. Files are mapped, not read, so that a tensor
costs memory when it is used.

    {"model": {...}, "foundling": {...}, "tokenizer": {...}}     ours: one file with everything
    {"model" | "state_dict" | "model_state_dict" | "module" | "app": {...}}
    {name: tensor}                                               by anybody's names
"""

import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from foundling.checkpoint.streams import sealing
from foundling.checkpoint.tensor_index import TensorSpec
from foundling.config import CheckpointError

WRAPPINGS = ("_orig_mod.", "module.")


def load_torch(file: Path) -> Any:
    """What a torch.save file holds: tensors and plain values, or a refusal."""
    try:
        _check_plain(file)
        return _load(file)
    except CheckpointError:
        raise
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


def _check_plain(file: Path) -> None:
    """torch stores plainly; a compressed archive could unpack to a thousand times its size."""
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as archive:
        if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
            raise CheckpointError(f"{file} is a compressed archive, which torch.save never writes.")


def _load(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):  # files from before torch 1.6 cannot be mapped
            raise
        return torch.load(file, map_location="cpu", weights_only=True)


def save_torch(path: Path, content: Any) -> None:
    """torch.save to a new file, which is on the disk then; a full one is an OSError."""
    with sealing(path) as stream:
        torch.save(content, cast(IO[bytes], stream))


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

    def __init__(self, tensors: Mapping[str, Tensor], where: Path) -> None:
        self._tensors: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            own = _unwrapped(name)
            if own in self._tensors:
                raise CheckpointError(
                    f"{where} holds {own} twice, with and without a wrapper's name."
                )
            if tensor.layout != torch.strided or tensor.is_quantized:
                raise CheckpointError(
                    f"{where} stores {name} in another form than number by number"
                    f" ({tensor.layout}, {tensor.dtype}); save it dense."
                )
            if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
                raise CheckpointError(
                    f"{where} states {name} as {list(tensor.shape)} and stores fewer numbers."
                )
            self._tensors[own] = tensor
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
        super().__init__(found, files[0])


def _unwrapped(name: str) -> str:
    for wrapping in WRAPPINGS:
        name = name.replace(wrapping, "")
    return name
