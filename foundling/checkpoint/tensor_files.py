"""The one place that talks to torch.distributed.checkpoint: tensors to files and back.

Bytes are hashed on their way out, so that a check compares what was meant with what is read back.
DCP's own fsync is not relied on (it comes before `.metadata` is flushed, so it forces nothing), and
its errors are unpacked. Rejected: safetensors, which knows no sharded tensors; and hashing files
after they are written, which blesses whatever the disk made of them.
"""

import contextlib
import hashlib
import io
import os
import warnings
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from foundling.checkpoint.ranks import has_ranks
from foundling.checkpoint.seal import FileSeal


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, FileSeal]:
    """Let DCP write this rank's share; the seals of all ranks' files come back."""
    files = _SealingFiles()
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _quiet(), _unwrapped():
        dcp_save(
            dict(tensors),
            storage_writer=_Writer(folder, files),
            planner=planner,
            no_dist=not has_ranks(),
        )
    if not has_ranks():
        return files.seals
    shares: list[dict[str, FileSeal]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(shares, files.seals)
    return {name: seal for share in shares for name, seal in share.items()}


def read_tensors(path: Path, index: Metadata, into: Mapping[str, Tensor]) -> None:
    """Let DCP fill `into` in place, guided by an index that was read with care.

    Always without collectives: each rank reads what it needs, and one may read alone.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _quiet(), _unwrapped():
        dcp_load(dict(into), storage_reader=_Reader(path, index), planner=planner, no_dist=True)


class _SealingStream(io.RawIOBase):
    """A file that is hashed while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._size = 0
        self.failure: BaseException | None = None

    def write(self, data: Any, /) -> int:
        self._hash.update(data)
        try:
            written = self._file.write(data)
        except BaseException as error:
            self.failure = error
            raise
        self._size += written
        return written

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def seal(self) -> FileSeal:
        """Force what was written to the disk and say what it was."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileSeal(self._size, self._hash.hexdigest())


class _SealingFiles(FileSystem):
    """DCP's file system, with a seal for each file written through it."""

    def __init__(self) -> None:
        self.seals: dict[str, FileSeal] = {}

    @contextlib.contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        with open(path, mode) as file:
            stream = _SealingStream(cast(BinaryIO, file))
            try:
                yield stream
            except BaseException:
                # torch.save hides a full disk behind a complaint about positions in its archive.
                if stream.failure is not None:
                    raise stream.failure from None
                raise
            self.seals[Path(path).name] = stream.seal()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        os.rename(path, new_path)
        self.seals[Path(new_path).name] = self.seals.pop(Path(path).name)


class _Writer(FileSystemWriter):
    """Writes through sealing files, and leaves no path or random name in the index: the same
    tensors give the same bytes, wherever they are saved."""

    def __init__(self, path: Path, files: FileSystem) -> None:
        super().__init__(path, sync_files=False, overwrite=False)
        self.fs = files

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


class _Reader(FileSystemReader):
    """Hands DCP the index that was already read with care, so that it never unpickles one."""

    def __init__(self, path: Path, index: Metadata) -> None:
        super().__init__(path)
        self._index = index

    def read_metadata(self) -> Metadata:
        return self._index


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
