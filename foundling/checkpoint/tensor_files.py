"""The one place that writes and reads tensor files, in the format of torch.distributed.checkpoint.

Bytes are hashed on their way out, so that a check compares what was meant with what is read back.
DCP's planner says what goes where and DCP's loader reads; its writer is not used, because it talks
to the other ranks in between, hides a failure in one of its threads, and does not force `.metadata`
to the disk. Rejected: safetensors, which knows no sharded tensors; and hashing files after they are
written, which blesses whatever the disk made of them.
"""

import contextlib
import hashlib
import io
import os
import pickle
import warnings
import zipfile
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from foundling.checkpoint.remote import Folder, RemotePath
from foundling.checkpoint.seal import FileSeal, check_hash, force_file, write_durably
from foundling.checkpoint.tensor_index import INDEX
from foundling.config import CheckpointError
from foundling.runtime import points

WRITERS = 4
"""Files of one rank that are written beside each other."""
LARGE = 1 << 20
"""Bytes that are worth a thread."""
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
            start = stream.tell()
            torch.save(copies[item.index], cast(IO[bytes], stream))
            places[item.index] = _StorageInfo(name, start, stream.tell() - start)
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


def read_tensors(path: Folder, index: Metadata, into: Mapping[str, Tensor]) -> None:
    """Let DCP fill `into` in place, guided by an index that was read with care.

    Always without collectives: each rank reads what it needs, and one may read alone.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _quiet(), _unwrapped():
        dcp_load(dict(into), storage_reader=_Reader(path, index), planner=planner, no_dist=True)


class SealingStream(io.RawIOBase):
    """A file that is hashed while it is written; with `helper`, large pieces by that thread."""

    def __init__(self, file: BinaryIO, helper: ThreadPoolExecutor | None = None) -> None:
        self._file, self._helper = file, helper
        self._hash = hashlib.sha256()
        self._size = 0
        self.failure: BaseException | None = None

    def write(self, data: Any, /) -> int:
        job = None
        if self._helper is not None and len(data) >= LARGE:
            job = self._helper.submit(self._hash.update, data)
        else:
            self._hash.update(data)
        try:
            points.at("write")
            written = self._file.write(data)
        except BaseException as error:
            self.failure = error
            raise
        finally:
            if job is not None:  # the memory is the caller's again afterwards
                job.result()
        self._size += written
        return written

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    @property
    def sealed(self) -> FileSeal:
        """What was written."""
        return FileSeal(self._size, self._hash.hexdigest())


@contextlib.contextmanager
def sealing(
    path: Folder, helper: ThreadPoolExecutor | None = None
) -> Generator[SealingStream, None, None]:
    """Open a new file; when it is closed it is on the disk."""
    with path.open("wb" if isinstance(path, RemotePath) else "xb") as file:
        stream = SealingStream(file, helper)
        try:
            yield stream
        except BaseException:
            # torch.save hides a full disk behind a complaint about positions in its archive.
            if stream.failure is not None:
                raise stream.failure from None
            raise
        if not isinstance(path, RemotePath):
            force_file(file)


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


class Window(io.RawIOBase):
    """A part of a file as a file; nothing outside it can be read."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._place = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._length}[whence]
        if origin + offset < 0:
            raise OSError("a place before the beginning")
        self._place = origin + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        room = max(0, min(len(view), self._length - self._place))
        self._file.seek(self._start + self._place)
        data = self._file.read(room)
        view[: len(data)] = data
        self._place += len(data)
        return len(data)


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
