"""The index (.metadata) of a DCP checkpoint, unpickled by an allow-list of names."""

import io
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from foundling.checkpoint.manifest import read_small
from foundling.checkpoint.remote import Folder, describe
from foundling.config.errors import CheckpointError

# A pickle of DCP's, read into inert records.
#
# `.metadata` is a pickle, and unpickling runs whatever is hidden in it. This unpickler knows a
# short list of names and builds a record of each, never torch's own classes (a pickle can change
# even an allowed class). The caller checks what the records say. It needs no torch: code that
# reads says what torch's types of numbers are to be.

_DCP_CLASSES = "torch.distributed.checkpoint"


class Record:
    """Stands for any class of the pickle; keeps what it was given and does nothing."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _names(dtypes: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """What a pickle may name, each mapped to a record class of its own, made anew for each file."""
    allowed: dict[tuple[str, str], Any] = {
        (module, name): type(name, (Record,), {})
        for module, name in [
            (f"{_DCP_CLASSES}.metadata", "Metadata"),
            (f"{_DCP_CLASSES}.metadata", "TensorStorageMetadata"),
            (f"{_DCP_CLASSES}.metadata", "BytesStorageMetadata"),
            (f"{_DCP_CLASSES}.metadata", "TensorProperties"),
            (f"{_DCP_CLASSES}.metadata", "ChunkStorageMetadata"),
            (f"{_DCP_CLASSES}.metadata", "MetadataIndex"),
            (f"{_DCP_CLASSES}.metadata", "StorageMeta"),
            (f"{_DCP_CLASSES}.metadata", "_MEM_FORMAT_ENCODING"),
            (f"{_DCP_CLASSES}.filesystem", "_StorageInfo"),
            ("torch.serialization", "_get_layout"),
            # Some releases of Python 3.11 pickle an enum's member as getattr(class, name).
            ("builtins", "getattr"),
            # Other writers note where they wrote, as a path; it stays a record like the rest.
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
        ]
    }
    allowed["torch", "Size"] = tuple
    return allowed | {("torch", name): value for name, value in dtypes.items()}


_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.MEMOIZE, pickle.BINGET),
    *(pickle.LONG_BINGET, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT),
    *(pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.SHORT_BINUNICODE, pickle.BINUNICODE),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM),
    *(pickle.SETITEMS, pickle.STACK_GLOBAL, pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD),
)


class InertUnpickler(pickle._Unpickler):
    """Python's own unpickler in Python: it knows only the operations that an index needs, and does
    not reserve gigabytes because a number in the file says so, as the one in C does."""

    dispatch: ClassVar = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES}

    def __init__(self, content: bytes, dtypes: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(content))
        self._allowed = _names(dtypes)

    def find_class(self, module: str, name: str, /) -> Any:
        try:
            return self._allowed[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}") from None


# What DCP's `.metadata` says, as plain tuples.

Sizes = tuple[int, ...]


class Chunk(NamedTuple):
    """A piece of a tensor."""

    offsets: Sizes
    sizes: Sizes


class IndexEntry(NamedTuple):
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

    tensors: Mapping[str, IndexEntry]
    spots: Mapping[tuple[str, Sizes], Spot]


# DCP's `.metadata`, read without trusting it.
#
# `.metadata` is a pickle, and `dcp.load` executes code in it. Here it is read into inert records,
# and an index of plain tuples is built from them after every value was checked. Tensors only: byte
# entries are pickles again and are refused. Rejected: an allow-list of real classes, and a second
# index of our own in JSON, which could disagree with DCP's.

INDEX = ".metadata"
MAX_INDEX_BYTES = 1 << 32
"""405 billion parameters in 256 pieces each make an eighth of a GiB."""
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
T = TypeVar("T")


class TensorSpec(NamedTuple):
    """Shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


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


def _tensor(name: Any, record: Any) -> IndexEntry:
    _of(name, str)
    if type(record).__name__ == "BytesStorageMetadata":
        raise _BadIndexError(f"{name} holds bytes, and only tensors are loaded")
    fields = _state(_of(record, Record), "TensorStorageMetadata")
    properties = _state(fields["properties"], "TensorProperties", tuple)
    chunks = [_state(entry, "ChunkStorageMetadata") for entry in fields["chunks"]]
    return IndexEntry(
        _sizes(fields["size"]),
        _of(properties[0], torch.dtype),
        tuple(Chunk(_sizes(chunk["offsets"]), _sizes(chunk["sizes"])) for chunk in chunks),
    )


def _check_covered(name: str, entry: IndexEntry) -> None:
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
