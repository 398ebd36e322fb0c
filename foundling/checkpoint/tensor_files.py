"""The one place that writes and reads tensor files, in the format of torch.distributed.checkpoint.

Bytes are hashed on their way out, so that a check compares what was meant with what is read back.
DCP's planner says what goes where and DCP's loader reads; its writer is not used, because it talks
to the other ranks in between, hides a failure in one of its threads, and does not force `.metadata`
to the disk. Rejected: safetensors, which knows no sharded tensors; and hashing files after they are
written, which blesses whatever the disk made of them.
"""

import contextlib
import io
import os
import pickle
import warnings
import zipfile
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
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
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from foundling.checkpoint.index_form import Index
from foundling.checkpoint.remote import Folder
from foundling.checkpoint.seal import FileSeal, check_hash, write_durably
from foundling.checkpoint.streams import Window, save_tensor, sealing
from foundling.checkpoint.tensor_index import INDEX
from foundling.config import CheckpointError

WRITERS = 4
"""Files of one rank that are written beside each other."""
Copies = Mapping[MetadataIndex, Tensor]


@dataclass(frozen=True)
class Written:
    """One rank's files and where in them its pieces are."""

    seals: dict[str, FileSeal]
    places: dict[MetadataIndex, _StorageInfo]


def write_files(
    folder: Folder, files: Mapping[str, Sequence[WriteItem]], copies: Copies
) -> Written:
    """Write this rank's files and read them back; on return they are on the disk as meant."""
    written = Written({}, {})
    with ThreadPoolExecutor(max(1, min(WRITERS, len(files)))) as pool:
        jobs = {name: pool.submit(_write, folder, name, files[name], copies) for name in files}
        try:
            for name, job in jobs.items():
                seal, places = job.result()
                written.seals[name] = seal
                written.places.update(places)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return written


def _write(
    folder: Folder, name: str, items: Sequence[WriteItem], copies: Copies
) -> tuple[FileSeal, dict[MetadataIndex, _StorageInfo]]:
    places: dict[MetadataIndex, _StorageInfo] = {}
    with sealing(folder / name) as stream:
        for item in items:
            start, length = save_tensor(copies[item.index], stream)
            places[item.index] = _StorageInfo(name, start, length)
    if isinstance(folder, Path):
        # A store of objects checks what it is sent; a disk does not, and asking is cheap.
        check_hash(folder, name, stream.sealed)
    return stream.sealed, places


def write_index(folder: Folder, index: Metadata, written: Sequence[Written]) -> FileSeal:
    """Write `.metadata`: no path and no random name in it, so that the same tensors give the same
    bytes wherever they are saved."""
    places = {key: place for share in written for key, place in share.places.items()}
    version = getattr(filesystem, "CURRENT_DCP_VERSION", "1.0.0")
    whole = replace(index, storage_data=places, storage_meta=StorageMeta(), version=version)
    return write_durably(folder / INDEX, pickle.dumps(whole))


def read_tensors(path: Folder, index: Index, into: Mapping[str, Tensor]) -> None:
    """Let DCP fill `into` in place, guided by an index that was read with care.

    Always without collectives: each rank reads what it needs, and one may read alone.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _quiet(), _unwrapped():
        dcp_load(
            dict(into), storage_reader=_Reader(path, _for_dcp(index)), planner=planner, no_dist=True
        )


def _for_dcp(index: Index) -> Metadata:
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
    return Metadata(
        state_dict_metadata={**tensors},
        storage_data={MetadataIndex(*where): _StorageInfo(*p) for where, p in index.spots.items()},
        storage_meta=StorageMeta(),
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


class _Reader(FileSystemReader):
    """Hands DCP the index that was already read with care, so that it never unpickles one."""

    def __init__(self, path: Folder, index: Metadata) -> None:
        super().__init__(str(path))
        self.fs = _Files()
        self.path = cast(Any, path)
        self._index = index

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._index

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        """The archive of one piece: stored plainly, as torch writes it, or it is not opened.

        A compressed one could unpack to a thousand times its size before its shape is looked at.
        """
        piece = cast(IO[bytes], Window(file, sinfo.offset, sinfo.length))
        with zipfile.ZipFile(piece) as archive:
            records = archive.infolist()
        plain = all(record.compress_type == zipfile.ZIP_STORED for record in records)
        if not plain or sum(record.file_size for record in records) > sinfo.length:
            raise CheckpointError(f"{sinfo.relative_path} holds a compressed archive")
        piece.seek(0)
        return piece


@contextlib.contextmanager
def _quiet() -> Generator[None, None, None]:
    """DCP warns that there is one process whenever there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"torch\.distributed is disabled, unavailable")
        yield


@contextlib.contextmanager
def _unwrapped() -> Generator[None, None, None]:
    """Raise what went wrong instead of CheckpointException, which is no Exception and would carry
    even a Ctrl-C past every handler made for it."""
    try:
        yield
    except CheckpointException as error:
        failures = [failure for failure, _ in error.failures.values()]
        raise next(iter(failures), RuntimeError(str(error))) from None
