"""Tensors and JSON into a folder that is whole or not there, and back in place.

A save goes: tensors by torch.distributed.checkpoint into a fresh temporary folder, meta.json, every
file forced to the disk, manifest.json, a check of every byte, rename. Killed anywhere before the
rename, the folder has a name nobody reads; after it, the checkpoint is whole. Writing over an old
folder instead leaves 21 of 40 killed saves looking valid and not loading.

Bytes are hashed on their way out, so that the check compares what was meant with what is read back,
and DCP's own fsync is not relied on (it comes before `.metadata` is flushed, so it forces nothing).
With a process group every rank calls `save`; rank 0 prepares, seals and renames, and its outcome,
good or bad, reaches the others before any returns.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import warnings
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from foundling.checkpoint import folders
from foundling.checkpoint.seal import (
    META,
    FileSeal,
    Seal,
    check_file,
    read_seal,
    verify,
    write_durably,
    write_seal,
)
from foundling.checkpoint.tensor_index import TensorSpec, read_index, specs_of
from foundling.config import CheckpointError
from foundling.runtime import fsync_dir, replace_folder, warn

T = TypeVar("T")


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
    """Write the checkpoint of `step` into `folder` and return its path.

    A whole checkpoint of that step is kept as it is; a damaged one is moved aside first.
    """
    if meta.get("step", step) != step:
        raise ValueError(f"meta says step {meta['step']} and the checkpoint is of step {step}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; a checkpoint holds tensors only")
    content = json.dumps(meta, indent=2, allow_nan=False) + "\n"
    final = folders.final_path(folder, step)
    try:
        kept, temporary = _on_main(lambda: _prepare(folder, step))
        if kept is None:
            _write(temporary, final, step, tensors, content.encode())
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {folder}: "
            f"{error.strerror or error}; make room there, earlier checkpoints are untouched."
        ) from error
    return kept or final


def load_meta(path: Path) -> dict[str, Any]:
    """The JSON that was saved beside the tensors, checked against its checksum."""
    seal = read_seal(path)
    try:
        check_file(path, META, seal.files[META])
        meta: dict[str, Any] = json.loads((path / META).read_bytes())
    except (OSError, KeyError):
        raise CheckpointError(f"checkpoint {path} is damaged: {META} is missing.") from None
    return meta


def tensor_specs(path: Path) -> dict[str, TensorSpec]:
    """Shape and dtype of every tensor in a checkpoint, without reading the tensors."""
    return specs_of(read_index(path))


def load_tensors(
    path: Path, into: Mapping[str, Tensor], *, prefix: str = "", check: bool = True
) -> None:
    """Fill the tensors of `into` in place from a checkpoint that must have exactly their names.

    Only stored names that begin with `prefix` count. `check=False` is for a path that `latest` or
    `verify` has just passed: the checksums are then not computed twice.
    """
    if check:
        verify(path)
    index = read_index(path)
    stored = {name: spec for name, spec in specs_of(index).items() if name.startswith(prefix)}
    _match(path, stored, into)
    if not into:
        return
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        # Always without collectives: each rank reads what it needs, and one may read alone.
        with _quiet(), _unwrapped():
            dcp.load(dict(into), storage_reader=_Reader(path, index), planner=planner, no_dist=True)
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {path} could not be loaded: {' '.join(str(error).split())}."
        ) from error


def _prepare(folder: Path, step: int) -> tuple[Path | None, Path]:
    """Sweep, look for the step's checkpoint, and make the fresh folder (rank 0)."""
    folder.mkdir(parents=True, exist_ok=True)
    folders.sweep(folder)
    temporary = folders.temporary_path(folder, step)
    for path in folders.list_checkpoints(folder):
        if folders.step_of(path) == step:
            try:
                verify(path)
            except CheckpointError as error:
                warn(f"{error} It was moved to {folders.set_aside(path)}.")
            else:
                return path, temporary
    temporary.mkdir()
    return None, temporary


def _write(
    temporary: Path, final: Path, step: int, tensors: Mapping[str, Tensor], meta: bytes
) -> None:
    try:
        files = _write_tensors(temporary, tensors)
        _on_main(lambda: _finish(temporary, final, step, {**files, META: meta}, tensors.keys()))
    except BaseException:
        # Also frees the room a full disk needs; nobody would ever read it.
        if _is_main():
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, FileSeal]:
    """Let DCP write this rank's share; the seals of all ranks' files come back."""
    files = _SealingFiles()
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _quiet(), _unwrapped():
        dcp.save(
            dict(tensors),
            storage_writer=_Writer(folder, files),
            planner=planner,
            no_dist=not _has_ranks(),
        )
    if not _has_ranks():
        return files.seals
    shares: list[dict[str, FileSeal]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(shares, files.seals)
    return {name: seal for share in shares for name, seal in share.items()}


def _finish(
    temporary: Path, final: Path, step: int, files: Mapping[str, FileSeal | bytes], names: Any
) -> None:
    """Seal the folder, check it and give it its name (rank 0)."""
    seals = {
        name: item if isinstance(item, FileSeal) else write_durably(temporary / name, item)
        for name, item in files.items()
    }
    write_seal(temporary, Seal(step, seals))
    fsync_dir(temporary)
    verify(temporary)
    if tensor_specs(temporary).keys() != set(names):
        raise CheckpointError(
            f"the checkpoint of step {step} misses tensors; every rank must see {final.parent}."
        )
    replace_folder(temporary, final)


def _match(path: Path, stored: Mapping[str, TensorSpec], into: Mapping[str, Tensor]) -> None:
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


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def _is_main() -> bool:
    return not _has_ranks() or dist.get_rank() == 0


def _on_main(work: Callable[[], T]) -> T:
    """Do `work` on rank 0; its result or exception is every rank's, so that none waits alone."""
    if not _has_ranks():
        return work()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return cast(T, outcome[0])
