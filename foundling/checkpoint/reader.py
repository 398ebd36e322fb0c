"""Tensors of a checkpoint read back in place, under any layout, through DCP."""

import contextlib
import io
import os
import warnings
import zipfile
from collections.abc import Generator, Mapping
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from foundling.checkpoint.dcp_index import Index, Spot, TensorSpec, read_index, specs_of
from foundling.checkpoint.manifest import verify
from foundling.checkpoint.remote import Folder
from foundling.checkpoint.streams import Window
from foundling.config.errors import CheckpointError


def tensor_specs(path: Folder) -> dict[str, TensorSpec]:
    """Shape and dtype of every tensor in a checkpoint, without reading the tensors."""
    return specs_of(read_index(path))


def check_fit(path: Folder, into: Mapping[str, Tensor]) -> None:
    """Refuse what `load_tensors` would refuse by name or shape, without reading the tensors."""
    _match(path, tensor_specs(path), into)


def load_tensors(path: Folder, into: Mapping[str, Tensor], *, check: bool = True) -> None:
    """Fill the tensors of `into` in place from a checkpoint that must have exactly their names.

    Plain tensors and DTensors of any layout: each rank reads the pieces it holds. `check=False` is
    for a path that `latest` or `verify` has just passed: the checksums are then not computed twice.
    """
    if check:
        verify(path)
    index = read_index(path)
    _match(path, specs_of(index), into)
    if not into:
        return
    try:
        read_tensors(path, index, into)
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {path} could not be loaded: {' '.join(str(error).split())}."
        ) from error


def _match(path: Folder, stored: Mapping[str, TensorSpec], into: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint of another shape, naming the first few differences."""
    if missing := [name for name in into if name not in stored]:
        raise CheckpointError(f"checkpoint {path} lacks {_few(missing)}.")
    if unexpected := [name for name in stored if name not in into]:
        raise CheckpointError(f"checkpoint {path} has {_few(unexpected)}, which nobody asked for.")
    wrong = [
        f"{name} (stored {_spec_text(stored[name])}, wanted {_spec_text(wanted)})"
        for name, wanted in ((n, TensorSpec(tuple(t.shape), t.dtype)) for n, t in into.items())
        if stored[name] != wanted
    ]
    if wrong:
        raise CheckpointError(f"checkpoint {path} does not fit: {_few(wrong)}.")


def _few(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def _spec_text(spec: TensorSpec) -> str:
    return f"{str(spec.dtype).removeprefix('torch.')} {list(spec.shape)}"


def read_tensors(path: Folder, index: Index, into: Mapping[str, Tensor]) -> None:
    """Let DCP fill `into` in place, guided by an index that was read with care.

    Always without collectives: each rank reads what it needs, and one may read alone.
    """
    asked = Index({name: index.tensors[name] for name in into}, index.spots)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        # DCP warns that there is one process whenever there is one process.
        warnings.filterwarnings("ignore", message=r"torch\.distributed is disabled, unavailable")
        try:
            dcp_load(
                dict(into),
                storage_reader=_TensorReader(path, for_dcp(asked)),
                planner=planner,
                no_dist=True,
            )
        except CheckpointException as error:
            # It is no Exception and would carry even a Ctrl-C past every handler made for it.
            failures = [failure for failure, _ in error.failures.values()]
            raise next(iter(failures), RuntimeError(str(error))) from None


def for_dcp(index: Index) -> Metadata:
    """The index in DCP's own classes."""
    tensors = {
        name: TensorStorageMetadata(
            properties=TensorProperties(dtype=entry.dtype),
            size=torch.Size(entry.size),
            chunks=[
                ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                for chunk in entry.chunks
            ],
        )
        for name, entry in index.tensors.items()
    }
    places = {
        # _StorageInfo: what DCP's reader finds a tensor's bytes by; it has no public form.
        MetadataIndex(name, torch.Size(chunk.offsets)): _StorageInfo(
            *index.spots[name, chunk.offsets]
        )
        for name, entry in index.tensors.items()
        for chunk in entry.chunks
    }
    return Metadata(
        state_dict_metadata={**tensors}, storage_data=places, storage_meta=StorageMeta()
    )


class _Files(FileSystem):
    """DCP's file system over a folder of ours, wherever that is."""

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    @contextlib.contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        with cast(Any, path).open(mode) as file:
            yield file


class _TensorReader(FileSystemReader):
    """Hands DCP the index that was already read with care, so that it never unpickles one."""

    def __init__(self, path: Folder, index: Metadata) -> None:
        super().__init__(str(path))
        self.fs = _Files()
        self.path = cast(Any, path)
        self._index = index

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._index

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        return plain_archive(file, Spot(sinfo.relative_path, sinfo.offset, sinfo.length))


def plain_archive(file: Any, spot: Spot) -> IO[bytes]:
    """The archive of one piece: stored plainly, as torch writes it, or it is not opened.

    A compressed one could unpack to a thousand times its size before its shape is looked at.
    """
    piece = cast(IO[bytes], Window(file, spot.offset, spot.length))
    with zipfile.ZipFile(piece) as archive:
        records = archive.infolist()
    plain = all(record.compress_type == zipfile.ZIP_STORED for record in records)
    if not plain or sum(record.file_size for record in records) > spot.length:
        raise CheckpointError(f"{spot.file} holds a compressed archive")
    piece.seek(0)
    return piece
