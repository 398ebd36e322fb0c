"""DCP's `.metadata`, read without trusting it.

`.metadata` is a pickle, and `dcp.load` runs whatever is hidden in it. Here it is read into inert
records (runtime/inert_pickle.py), and an index of plain tuples is built from what they say, after
each value was seen to be what it should. Tensors only: byte entries are pickles again and are
refused. Rejected: an allow-list of real classes, and a second index of our own in JSON, which could
disagree with DCP's.
"""

import math
import pickle
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from foundling.checkpoint.index_form import Chunk, Entry, Index, Sizes, Spot
from foundling.checkpoint.remote import Folder, describe
from foundling.checkpoint.seal import read_small
from foundling.config import CheckpointError
from foundling.runtime.inert_pickle import InertUnpickler, Record

INDEX = ".metadata"
MAX_INDEX_BYTES = 1 << 32
"""405 billion parameters in 256 pieces each make an eighth of a GiB."""
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
T = TypeVar("T")


class TensorSpec(NamedTuple):
    """Shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def read_index(path: Folder, *, skip_bytes: bool = False) -> Index:
    """The index of a checkpoint's tensors, rebuilt from checked values, or CheckpointError.

    `skip_bytes` is for folders of other writers: byte entries are left out instead of refused, and
    never opened.
    """
    try:
        content = read_small(path, INDEX, MAX_INDEX_BYTES)
        present = describe(path)
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} has no index of tensors: {error}.") from None
    try:
        index = _rebuild(InertUnpickler(content, _DTYPES).load(), skip_bytes)
    except Exception as error:  # hostile bytes may raise anything, and nothing of it is ours
        reason = str(error) if isinstance(error, pickle.UnpicklingError | _BadIndexError) else ""
        raise CheckpointError(
            f"checkpoint {path} is not to be trusted: {INDEX} is not an index of tensors"
            f"{': ' + reason if reason else ''}."
        ) from None
    for spot in index.spots.values():
        entry = present.get(spot.file)
        if entry is None or entry.kind != "file":
            raise CheckpointError(f"checkpoint {path} is torn: {spot.file} is missing.")
        if not 0 <= spot.offset <= spot.offset + spot.length <= entry.size:
            raise CheckpointError(
                f"checkpoint {path} is not to be trusted: {INDEX} points behind the end of"
                f" {spot.file}."
            )
    return index


def specs_of(index: Index) -> dict[str, TensorSpec]:
    """Shape and dtype of every tensor of an index."""
    return {name: TensorSpec(entry.size, entry.dtype) for name, entry in index.tensors.items()}


class _BadIndexError(Exception):
    """The pickle was harmless and its content is not what DCP writes."""


def _rebuild(record: Any, skip_bytes: bool) -> Index:
    fields = _state(record, "Metadata")
    tensors = {
        name: _tensor(name, entry)
        for name, entry in fields["state_dict_metadata"].items()
        if not (skip_bytes and type(entry).__name__ == "BytesStorageMetadata")
    }
    storage = dict(
        _storage_entry(key, info)
        for key, info in fields["storage_data"].items()
        if not skip_bytes or _state(key, "MetadataIndex")["fqn"] in tensors
    )
    for name, entry in tensors.items():
        _check_covered(name, entry)
        for chunk in entry.chunks:
            if (name, chunk.offsets) not in storage:
                raise _BadIndexError(f"{name} is nowhere stored")
    _of(fields.get("version") or "", str)
    return Index(tensors, storage)


def _tensor(name: Any, record: Any) -> Entry:
    _of(name, str)
    if type(record).__name__ == "BytesStorageMetadata":
        raise _BadIndexError(f"{name} holds bytes, and only tensors are loaded")
    fields = _state(_of(record, Record), "TensorStorageMetadata")
    properties = _state(fields["properties"], "TensorProperties", tuple)
    chunks = [_state(entry, "ChunkStorageMetadata") for entry in fields["chunks"]]
    return Entry(
        _sizes(fields["size"]),
        _of(properties[0], torch.dtype),
        tuple(Chunk(_sizes(chunk["offsets"]), _sizes(chunk["sizes"])) for chunk in chunks),
    )


def _check_covered(name: str, entry: Entry) -> None:
    """The pieces must make up the whole: a gap would be left as it was in memory, in silence."""
    inside = all(
        0 <= start <= start + length <= size
        for chunk in entry.chunks
        for start, length, size in zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
    )
    volume = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    if not inside or volume != math.prod(entry.size):
        raise _BadIndexError(f"the pieces of {name} do not make up the whole")


def _storage_entry(key: Any, info: Any) -> tuple[tuple[str, Sizes], Spot]:
    where = _state(key, "MetadataIndex")
    what = _state(info, "_StorageInfo")
    file = _of(what["relative_path"], str)
    if file != Path(file).name or file in ("", ".", ".."):
        raise _BadIndexError(f"it points to {file}, outside the checkpoint")
    if what.get("transform_descriptors"):
        raise _BadIndexError("it asks for a transformation of the stored bytes")
    return (
        (_of(where["fqn"], str), _sizes(where["offset"])),
        Spot(file, _of(what["offset"], int), _of(what["length"], int)),
    )


def _state(record: Any, kind: str, form: type = dict) -> Any:
    if not isinstance(record, Record) or type(record).__name__ != kind:
        raise _BadIndexError(f"there is no {kind} where one belongs")
    return _of(record.state, form)


def _of(value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise _BadIndexError(f"{value!r:.80} is no {kind.__name__}")
    return value


def _sizes(value: Any) -> Sizes:
    return tuple(_of(item, int) for item in _of(value, tuple))
