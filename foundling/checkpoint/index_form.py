"""What DCP's `.metadata` says, without DCP: its import takes a second, and a conversion has four.

Plain tuples, and the pickle that DCP's own classes would make of them, written by the names of
those classes. A test loads it with DCP and compares. Rejected: JSON of our own, which nobody else
reads.
"""

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

_DCP = "torch.distributed.checkpoint"
VERSION = "1.0.0"
Sizes = tuple[int, ...]


class Chunk(NamedTuple):
    """A piece of a tensor."""

    offsets: Sizes
    sizes: Sizes


class Entry(NamedTuple):
    """A tensor and its pieces."""

    size: Sizes
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class Spot(NamedTuple):
    """Where a piece lies."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Index:
    """The tensors of a folder, and where each piece lies, by its tensor's name and its offsets."""

    tensors: Mapping[str, Entry]
    spots: Mapping[tuple[str, Sizes], Spot]


def pickled(index: Index) -> bytes:
    """The bytes of `.metadata`."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=4).dump(_theirs(index))
    return stream.getvalue()


class _Name:
    """Something that lies in a module."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class _Call:
    """What a function or a class makes of arguments."""

    def __init__(self, what: _Name, *arguments: Any) -> None:
        self.what, self.arguments = what, arguments


class _Object:
    """An instance, made without its constructor and given its state."""

    def __init__(self, kind: _Name, state: Any) -> None:
        self.kind, self.state = kind, state


class _Pickler(pickle._Pickler):
    """Python's own pickler in Python, which also writes what is named and not there."""

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)
    save: Any
    write: Any

    def _save_name(self, name: _Name) -> None:
        self.save(name.module)
        self.save(name.name)
        self.write(pickle.STACK_GLOBAL)

    def _save_call(self, call: _Call) -> None:
        self.save(call.what)
        self.save(call.arguments)
        self.write(pickle.REDUCE)

    def _save_object(self, thing: _Object) -> None:
        self.save(thing.kind)
        self.save(())
        self.write(pickle.NEWOBJ)
        self.save(thing.state)
        self.write(pickle.BUILD)

    dispatch[_Name] = _save_name
    dispatch[_Call] = _save_call
    dispatch[_Object] = _save_object


def _theirs(index: Index) -> _Object:
    in_metadata = {
        name: _Name(f"{_DCP}.metadata", name)
        for name in (
            *("Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties"),
            *("ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
        )
    }
    size, info = _Name("torch", "Size"), _Name(f"{_DCP}.filesystem", "_StorageInfo")
    contiguous = _Call(in_metadata["_MEM_FORMAT_ENCODING"], 0)
    strided = _Call(_Name("torch.serialization", "_get_layout"), "torch.strided")

    def tensor(entry: Entry) -> _Object:
        dtype = _Name("torch", str(entry.dtype).removeprefix("torch."))
        properties = (dtype, strided, False, contiguous, False)
        chunks = [
            {"offsets": _Call(size, chunk.offsets), "sizes": _Call(size, chunk.sizes)}
            for chunk in entry.chunks
        ]
        state = {
            "properties": _Object(in_metadata["TensorProperties"], properties),
            "size": _Call(size, entry.size),
            "chunks": [_Object(in_metadata["ChunkStorageMetadata"], chunk) for chunk in chunks],
        }
        return _Object(in_metadata["TensorStorageMetadata"], state)

    def key(name: str, offsets: Sizes) -> _Object:
        state = {"fqn": name, "index": None, "offset": _Call(size, offsets)}
        return _Object(in_metadata["MetadataIndex"], state)

    def place(spot: Spot) -> _Object:
        state = {"relative_path": spot.file, "offset": spot.offset, "length": spot.length}
        return _Object(info, state)

    state = {
        "state_dict_metadata": {name: tensor(entry) for name, entry in index.tensors.items()},
        "planner_data": None,
        "storage_data": {key(*where): place(spot) for where, spot in index.spots.items()},
        "storage_meta": None,
        "version": VERSION,
    }
    return _Object(in_metadata["Metadata"], state)
