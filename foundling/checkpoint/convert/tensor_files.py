"""Containers of tensors, read and written as streams: safetensors and torch.save files."""

import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor

from foundling.checkpoint.dcp_index import TensorSpec
from foundling.checkpoint.manifest import force_file
from foundling.checkpoint.streams import hashing
from foundling.config.errors import CheckpointError

# torch.save files, as a container of tensors and as a source of their own.
#
# Always `weights_only`: torch then builds tensors and plain values and nothing else, and a pickle
# that names anything more is refused before it runs. Files are mapped, not read, so that a tensor
# costs memory when it is used.
#
# {"model": {...}, "foundling": {...}, "tokenizer": {...}}     ours: one file with everything
# {"model" | "state_dict" | "model_state_dict" | "module" | "app": {...}}
# {name: tensor}                                               by anybody's names

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
    with hashing(path) as stream:
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
            own = name
            for wrapping in WRAPPINGS:
                own = own.replace(wrapping, "")
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
        self.specs = {
            name: TensorSpec(tuple(tensor.shape), tensor.dtype)
            for name, tensor in self._tensors.items()
        }

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


# safetensors, read and written tensor by tensor with plain reads and writes.
#
# The format is a length, a JSON header and the bytes. The safetensors library maps the whole file
# into memory and writes from a dict of all tensors; here one tensor at a time is read, and what the
# header says is checked before.

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER = 100 << 20


class SafeTensors:
    """One .safetensors file, or the shards that an index names."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._places: dict[str, tuple[Path, int]] = {}
        self.specs: dict[str, TensorSpec] = {}
        self.files = tuple(files)
        for file in files:
            self._add(file)

    def read(self, name: str) -> Tensor:
        """One tensor."""
        file, start = self._places[name]
        return read_part(file, start, self.specs[name])

    def _add(self, file: Path) -> None:
        header, start = _header(file)
        room = file.stat().st_size - start
        ends: list[tuple[int, int]] = []
        for name, entry in header.items():
            spec, (begin, end) = _entry(file, name, entry)
            if not 0 <= begin <= end <= room or end - begin != spec.nbytes:
                raise CheckpointError(f"{file} is damaged: {name} does not fit into the file.")
            if name in self.specs:
                raise CheckpointError(f"{file} holds {name}, which another file holds too.")
            self.specs[name], self._places[name] = spec, (file, start + begin)
            ends.append((begin, end))
        # As the format and other readers of it require.
        places = [0, *(place for pair in sorted(ends) for place in pair), room]
        if places[::2] != places[1::2]:
            raise CheckpointError(f"{file} is damaged: its tensors overlap or leave gaps.")


def open_folder_of_tensors(folder: Path) -> SafeTensors:
    """The tensors of a Hugging Face folder, sharded or not."""
    listed, single = folder / INDEX, folder / SINGLE
    if not listed.is_file():
        if single.is_file():
            return SafeTensors([single])
        files = sorted(folder.glob("*.safetensors"))
        if len(files) == 1:
            return SafeTensors(files)
        raise CheckpointError(f"{folder} has {len(files)} safetensors files and no {INDEX}.")
    try:
        shards = json.loads(listed.read_text())["weight_map"]
        names = sorted({str(shard) for shard in shards.values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{listed} is damaged: it names no shards.") from None
    is_there = [(folder / name).is_file() for name in names]
    if single.is_file() and SINGLE not in names and any(is_there):
        # transformers would take that, and others these.
        raise CheckpointError(
            f"{folder} holds two models, {SINGLE} and the shards of {INDEX}; move one of them away."
        )
    if single.is_file() and not any(is_there):  # the index is of an older save, whose shards went
        return SafeTensors([single])
    for name in names:
        if name != os.path.basename(name) or not (folder / name).is_file():
            raise CheckpointError(f"{folder} lacks {name}, which {INDEX} names.")
    found = SafeTensors([folder / name for name in names])
    if missing := sorted(shards.keys() - found.specs.keys()):
        raise CheckpointError(f"{folder} lacks {missing[0]}, which {INDEX} names.")
    return found


def read_part(file: Path, start: int, spec: TensorSpec) -> Tensor:
    """A tensor that is a part of a file. Read and not mapped: a file that becomes shorter is an
    error to a read, and to a map the end of the process."""
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=spec.dtype)
    raw = np.fromfile(file, np.uint8, spec.nbytes, offset=start)
    if len(raw) < spec.nbytes:
        raise CheckpointError(f"{file} became shorter while it was read.")
    return torch.from_numpy(raw).view(spec.dtype).view(spec.shape)


def write_file(path: Path, specs: Mapping[str, TensorSpec], read: Callable[[str], Tensor]) -> None:
    """A new file with these tensors, each asked for when it is its turn, forced to the disk."""
    with open(path, "xb") as file:
        file.write(_header_of(specs))
        for name, spec in specs.items():
            tensor = read(name)
            if tuple(tensor.shape) != tuple(spec.shape) or tensor.dtype != spec.dtype:
                raise ValueError(f"{name} is {tensor.shape} {tensor.dtype} and not {spec}")
            numbers: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            file.write(memoryview(numbers))
            del tensor, numbers
        force_file(file)


def _header_of(specs: Mapping[str, TensorSpec]) -> bytes:
    """What stands before the numbers of these tensors, which follow each other in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, spec in specs.items():
        entries[name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [place, place + spec.nbytes],
        }
        place += spec.nbytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the format wants the numbers at a multiple of eight
    return len(header).to_bytes(8, "little") + header


def _header(file: Path) -> tuple[dict[str, Any], int]:
    try:
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= MAX_HEADER:
                raise ValueError
            header = json.loads(stream.read(length))
        if not isinstance(header, dict):
            raise ValueError
        header.pop("__metadata__", None)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{file} is no safetensors file, or it is damaged.") from None
    return header, 8 + length


def _entry(file: Path, name: str, entry: Any) -> tuple[TensorSpec, tuple[int, int]]:
    try:
        shape = tuple(map(index, entry["shape"]))
        begin, end = map(index, entry["data_offsets"])
        kind = str(entry["dtype"])
        if min(shape, default=0) < 0:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{file} is damaged: its header says nothing of {name}.") from None
    if kind not in DTYPES:
        raise CheckpointError(f"{file} stores {name} as {kind}, which cannot be read here.")
    return TensorSpec(shape, DTYPES[kind]), (begin, end)
