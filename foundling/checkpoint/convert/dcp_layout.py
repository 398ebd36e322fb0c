"""Folders of torch.distributed.checkpoint, anybody's: read with care, written tensor by tensor.

    {model: ...}                     torchtitan's; newer ones have the names without `model.`
    {app: {model: ..., optim: ...}}  a Stateful
    model/ and optim/                two folders

Which of them it is shows in the names. `.metadata` is read through the allow-list of
tensor_index.py and byte entries are never opened. DCP holds no config, so it has to lie beside:
foundling.json, Meta's params.json or Hugging Face's config.json, there or one folder up; or the
owner names one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from foundling.checkpoint.names import layout_of
from foundling.checkpoint.seal import FileSeal
from foundling.checkpoint.tensor_files import Written, read_tensors, sealing, write_index
from foundling.checkpoint.tensor_index import INDEX, TensorSpec, read_index, specs_of
from foundling.checkpoint.tensor_plan import FILE_BYTES
from foundling.config import CheckpointError


class DcpTensors:
    """The tensors of one folder."""

    def __init__(self, folder: Path, *, foreign: bool = True) -> None:
        self._folder = folder
        self._index = read_index(folder, skip_bytes=foreign)
        self._specs = specs_of(self._index)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Shape and dtype of each tensor."""
        return self._specs

    def read(self, name: str) -> Tensor:
        """One tensor."""
        spec = self._specs[name]
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        try:
            read_tensors(self._folder, self._index, {name: tensor})
        except Exception as error:
            raise CheckpointError(
                f"{self._folder} could not be read: {' '.join(str(error).split())}."
            ) from error
        return tensor


def dcp_folder(path: Path) -> Path | None:
    """The folder with the model's tensors, if this is a DCP folder of one of the known forms."""
    for folder in (path, path / "model"):
        if (folder / INDEX).is_file():
            return folder
    return None


def has_model(stored: DcpTensors, where: Path) -> None:
    """See that some known layout's names are among them."""
    if layout_of(stored.specs) is None:
        few = ", ".join(list(stored.specs)[:3])
        raise CheckpointError(
            f"{where} holds no model by names that are known here (it has {few or 'no tensors'})."
        )


@dataclass(frozen=True)
class Streamed:
    """What was written."""

    seals: dict[str, FileSeal]


def write_dcp(
    folder: Path, specs: Mapping[str, TensorSpec], read: Callable[[str], Tensor]
) -> Streamed:
    """Tensors into a new folder's files, each asked for when it is its turn."""
    written = Written({}, {})
    entries: dict[str, TensorStorageMetadata] = {}
    for number, names in enumerate(_files(specs)):
        file = f"__0_{number}.distcp"
        with sealing(folder / file) as stream:
            for name in names:
                tensor = compact(read(name))
                start = stream.tell()
                torch.save(tensor, stream)  # type: ignore[arg-type]
                key, entries[name] = _entry(name, tensor)
                written.places[key] = _StorageInfo(file, start, stream.tell() - start)
                del tensor
        written.seals[file] = stream.sealed
    index = Metadata(state_dict_metadata=dict(entries))
    written.seals[INDEX] = write_index(folder, index, [written])
    return Streamed(written.seals)


def compact(tensor: Tensor) -> Tensor:
    """The tensor with a storage of its own size: torch.save writes whole storages."""
    size = tensor.numel() * tensor.element_size()
    return tensor if tensor.untyped_storage().nbytes() == size else tensor.clone()


def _files(specs: Mapping[str, TensorSpec]) -> list[list[str]]:
    """Which tensors go into which file."""
    files: list[list[str]] = [[]]
    room = FILE_BYTES
    for name, spec in specs.items():
        size = spec.dtype.itemsize * int(torch.Size(spec.shape).numel())
        if files[-1] and size > room:
            files.append([])
            room = FILE_BYTES
        files[-1].append(name)
        room -= size
    return files


def _entry(name: str, tensor: Tensor) -> tuple[MetadataIndex, TensorStorageMetadata]:
    origin = torch.Size([0] * tensor.dim())
    return MetadataIndex(name, origin), TensorStorageMetadata(
        properties=TensorProperties(dtype=tensor.dtype),
        size=tensor.size(),
        chunks=[ChunkStorageMetadata(offsets=origin, sizes=tensor.size())],
    )
