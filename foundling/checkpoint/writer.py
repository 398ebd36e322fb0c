"""A checkpoint written: host staging of the tensors, DCP files, manifest, rename."""

import contextlib
import json
import math
import mmap
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo  # what its index is made of
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from foundling.checkpoint import folders
from foundling.checkpoint.dcp_index import INDEX
from foundling.checkpoint.manifest import (
    META,
    CheckpointManifest,
    FileDigest,
    check_hash,
    check_sizes,
    check_small,
    read_manifest,
    verify,
    write_durably,
    write_manifest,
)
from foundling.checkpoint.remote import F, Folder, RemotePath
from foundling.checkpoint.streams import FILE_BYTES, grouped, hashing
from foundling.config.errors import CheckpointError
from foundling.runtime import files as files_module
from foundling.runtime.console import warn
from foundling.runtime.dist import (
    Group,
    combine_on_main,
    is_main,
    on_main,
    rank_and_size,
    scatter_from_main,
)

K = TypeVar("K")
ALIGN = 512


class HostStaging:
    """Host memory that a save is copied into: once it is full, training may change the tensors.

    One block, kept between saves, because memory that is asked for anew costs a page fault every
    four kilobytes; in huge pages where the system has them. For tensors on a GPU it is locked in
    place, which makes the copy several times faster; it is registered and not allocated as pinned
    memory, since torch rounds those blocks up to a power of two.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._is_locked = False

    def reserve(self, parts: Mapping[K, Tensor]) -> None:
        """Have room for these parts; the first save would otherwise wait seconds for it."""
        size = sum(_room(part) for part in parts.values())
        if size > len(self._block):
            self.release()
            self._block = _memory(size)
            if any(part.is_cuda for part in parts.values()):
                self._lock()

    def fill(self, parts: Mapping[K, Tensor]) -> dict[K, Tensor]:
        """Copy every part; on return nothing of it hangs on the originals."""
        self.reserve(parts)
        copies: dict[K, Tensor] = {}
        start = 0
        for key, part in parts.items():
            files_module.failpoint("stage")
            copies[key] = self._part_of_block(start, part)
            copies[key].copy_(part, non_blocking=self._is_locked)
            start += _room(part)
        for device in {part.device for part in parts.values() if part.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def release(self) -> None:
        """Give the memory back."""
        if self._is_locked:
            _cudart().cudaHostUnregister(self._block.data_ptr())
        self._block, self._is_locked = torch.empty(0, dtype=torch.uint8), False

    def _lock(self) -> None:
        size = len(self._block)
        self._is_locked = not int(_cudart().cudaHostRegister(self._block.data_ptr(), size, 0))
        if self._is_locked:
            return
        # CUDA keeps an error until it is asked for: this kernel takes the blame, not training's.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda").add_(1)
        warn(
            f"{size / 2**30:.1f} GiB of memory could not be locked for saving, so each save stops"
            " training for longer; see `ulimit -l`."
        )

    def _part_of_block(self, start: int, part: Tensor) -> Tensor:
        """A tensor with a storage of exactly its size: torch.save writes whole storages."""
        if not part.numel():
            return torch.empty(part.shape, dtype=part.dtype)
        block = self._block.numpy()
        flat = torch.frombuffer(block, dtype=part.dtype, count=part.numel(), offset=start)
        return flat.view(part.shape)


def _room(part: Tensor) -> int:
    return math.ceil(part.nbytes / ALIGN) * ALIGN


def _memory(size: int) -> Tensor:
    """Bytes that are there already, not only promised."""
    pages = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).zero_()


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


# Who writes which tensors into which file: agreed once, and again only when the tensors change.
#
# The planning (pieces of DTensors, one writer for each replica, the index) is DCP's. It comes
# before the copy to the host and not with every save, so that a rank copies only what it writes:
# under data parallelism every rank holds everything, and N copies of the state on one host would be
# N times the memory.


@dataclass(frozen=True)
class WriteShare:
    """What one rank writes."""

    files: dict[str, list[WriteItem]]
    """The pieces of tensors in each of its files."""
    index: Metadata | None = None
    """Rank 0 only: all tensors and their pieces, without their places in files."""

    @property
    def items(self) -> list[WriteItem]:
        """All its pieces."""
        return [item for items in self.files.values() for item in items]


@dataclass(frozen=True)
class Sight:
    """This rank's view of the tensors to save."""

    planner: DefaultSavePlanner
    plan: SavePlan
    is_new: bool

    def piece(self, item: WriteItem) -> Tensor:
        """The live memory of one piece."""
        found = self.planner.resolve_data(item)
        assert isinstance(found, Tensor)
        return found.detach()


class Planner:
    """Remembers the last plan and makes a new one when the tensors are not as they were."""

    def __init__(self) -> None:
        self._last: list[WriteItem] | None = None
        self.agreed = WriteShare({})
        """What this rank writes by the last plan."""

    def look(self, tensors: Mapping[str, Tensor]) -> Sight:
        """What this rank holds of `tensors`, and whether that is new; no copy is made."""
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), is_coordinator=is_main())
        plan = planner.create_local_plan()
        return Sight(planner, plan, is_new=plan.items != self._last)

    def agree(self, sight: Sight, group: Group) -> None:
        """A new plan as `agreed`; every rank must call it. DCP refuses overlaps and gaps."""
        self._last = None
        made: list[WriteShare] = []

        def make(plans: list[SavePlan]) -> None:
            final, index = sight.planner.create_global_plan(plans)
            for rank, plan in enumerate(final):
                # The index of a large job is large, and only the one who writes it needs it.
                made.append(WriteShare(_files_of(rank, plan), None if rank else index))

        combine_on_main(lambda: sight.plan, make, group)
        self.agreed = scatter_from_main(lambda: made, group)
        self._last = sight.plan.items


def _files_of(rank: int, plan: SavePlan) -> dict[str, list[WriteItem]]:
    """A rank's pieces in files named as DCP names them; at least one, as DCP writes it."""
    files = grouped(((item, item_bytes(item)) for item in plan.items), FILE_BYTES)
    return {f"__{rank}_{number}.distcp": items for number, items in enumerate(files)}


def item_bytes(item: WriteItem) -> int:
    """Bytes of the piece that an item writes."""
    data = item.tensor_data
    assert data is not None
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


# Tensor files in the format of torch.distributed.checkpoint, for saves and for conversions.
#
# Bytes are hashed on their way out, so that a check compares what was meant with what is read back.
# Rejected: FileSystemWriter of DCP (docs/decisions/2026-11-19-our-writer-of-dcp-files.md);
# safetensors, which knows no sharded tensors; and hashing files after they are written, which
# blesses whatever the disk made of them.

WRITERS = 4
"""Files of one rank that are written at the same time."""


@dataclass(frozen=True)
class Written:
    """Files, and where in them pieces of tensors are."""

    digests: dict[str, FileDigest]
    places: dict[MetadataIndex, _StorageInfo]


def write_tensors(
    folder: Folder, name: str, items: Iterable[WriteItem], read: Callable[[WriteItem], Tensor]
) -> Written:
    """Write one file; `read` gives a piece when it is its turn."""
    places: dict[MetadataIndex, _StorageInfo] = {}
    with hashing(folder / name) as stream:
        for item in items:
            start = stream.tell()
            torch.save(read(item), stream)  # type: ignore[arg-type]
            places[item.index] = _StorageInfo(name, start, stream.tell() - start)
    return Written({name: stream.digest}, places)


def _write_files(folder: Folder, staged: "StagedSave") -> Written:
    """Write this rank's files and read them back; on return they are on the disk as meant."""

    def work(name: str) -> Written:
        items = staged.share.files[name]
        written = write_tensors(folder, name, items, lambda item: staged.copies[item.index])
        if isinstance(folder, Path):
            # A store of objects checks what it is sent; a disk does not, and asking is cheap.
            check_hash(folder, name, written.digests[name])
        return written

    with ThreadPoolExecutor(WRITERS) as pool:
        jobs = [pool.submit(work, name) for name in staged.share.files]
        try:
            return _together(job.result() for job in jobs)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _together(parts: Iterable[Written]) -> Written:
    whole = Written({}, {})
    for part in parts:
        whole.digests.update(part.digests)
        whole.places.update(part.places)
    return whole


def write_index(
    folder: Folder, index: Metadata, written: Iterable[Written]
) -> dict[str, FileDigest]:
    """Write `.metadata` and give the digests of all files. No path and no random name is in it, so
    that the same tensors give the same bytes wherever they are saved."""
    files = _together(written)
    version = getattr(filesystem, "CURRENT_DCP_VERSION", "1.0.0")
    whole = replace(index, storage_data=files.places, storage_meta=StorageMeta(), version=version)
    return {**files.digests, INDEX: write_durably(folder / INDEX, pickle.dumps(whole))}


# Tensors and JSON into a folder that is whole or not there.
#
# A save goes: a copy of the tensors on the host, their files into a fresh temporary folder, the
# index, meta.json, every file forced to the disk and read back, manifest.json, rename. Killed
# anywhere before the rename, the folder has a name that is never read; after it, the checkpoint is
# whole. A remote folder cannot be renamed: there the manifest, put last, makes it a checkpoint.
#
# With a process group every rank takes part; rank 0 prepares, writes the manifest and renames, and
# its outcome, good or bad, reaches the others before any returns.


class CommitToken:
    """Whether a save may still become a checkpoint: a rollback withdraws it from one that hangs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_withdrawn = False

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Around what makes a folder a checkpoint; CheckpointError if it must not be one."""
        with self._lock:
            if self._is_withdrawn:
                raise CheckpointError("the save was given up: the run went back behind it.")
            yield

    def withdraw(self, limit_s: float) -> bool:
        """From now on there is a checkpoint or there will be none; False if neither was to be had
        within the limit, because the save hangs in that very moment."""
        if not self._lock.acquire(timeout=limit_s):
            return False
        self._is_withdrawn = True
        self._lock.release()
        return True


@dataclass(frozen=True)
class StagedSave:
    """Everything a save needs, cut loose from the training."""

    step: int
    meta: bytes
    share: WriteShare
    copies: Mapping[MetadataIndex, Tensor]
    failure: Exception | None = None
    """Why this rank has nothing to write; the other ranks must get the error."""
    permit: CommitToken = field(default_factory=CommitToken)


def save(folder: F, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> F:
    """Write the checkpoint of `step` into `folder` and return its path.

    A whole checkpoint of that step is kept as it is; a damaged one is moved aside first.
    """
    content = checked_meta(step, tensors, meta)
    planner, stage = Planner(), HostStaging()
    sight = planner.look(tensors)
    planner.agree(sight, None)
    share = planner.agreed
    try:
        copies = stage.fill({item.index: sight.piece(item) for item in share.items})
        return write(folder, StagedSave(step, content, share, copies))
    finally:
        stage.release()


def checked_meta(step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> bytes:
    """The JSON of `meta`; a caller's mistake raises here, before anything is written."""
    if meta.get("step", step) != step:
        raise ValueError(f"meta says step {meta['step']} and the checkpoint is of step {step}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; a checkpoint holds tensors only")
    return (json.dumps(meta, indent=2, allow_nan=False) + "\n").encode()


def write(folder: F, staged: StagedSave, group: Group = None) -> F:
    """Make a checkpoint of what was staged; every rank of `group` must call it."""
    final = folders.final_path(folder, staged.step)
    try:
        kept, working = on_main(lambda: _prepare(folder, staged.step), group)
        if kept is not None:
            return folder / kept
        _write_folder(folder / working, final, staged, group)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of step {staged.step} could not be written to {folder}: "
            f"{error.strerror or error}; make room there, earlier checkpoints are untouched."
        ) from error
    return final


def _prepare(folder: Folder, step: int) -> tuple[str | None, str]:
    """Sweep, look for the step's checkpoint, and make the fresh folder (rank 0); names of what is
    kept and of the new folder."""
    if not isinstance(folder, RemotePath):
        folder.mkdir(parents=True, exist_ok=True)
    folders.sweep(folder)
    working = folders.working_path(folder, step)
    for path in folders.list_checkpoints(folder):
        if folders.step_of(path) == step:
            try:
                verify(path)
            except CheckpointError as error:
                if path == working and not (path / folders.MANIFEST).exists():
                    continue  # torn in a store without renames: cleared below
                warn(f"{error} It was moved to {folders.set_aside(path)}.")
            else:
                return path.name, working.name
    folders.make_fresh(working)
    return None, working.name


def _write_folder(working: F, final: F, staged: StagedSave, group: Group) -> None:
    def mine() -> Written:
        if staged.failure is not None:
            raise staged.failure
        if isinstance(working, Path) and not working.is_dir():
            raise CheckpointError(
                f"rank {rank_and_size()[0]} does not see {working}; checkpoints of several machines"
                " need a disk that all of them share."
            )
        return _write_files(working, staged)

    try:
        combine_on_main(mine, lambda written: _finish(working, final, staged, written), group)
    except BaseException:
        # Also frees room on a full disk; the folder would never be read.
        if is_main():
            folders.discard(working)
        raise


def _finish(working: F, final: F, staged: StagedSave, written: list[Written]) -> None:
    """Write the manifest, check the folder and give it its name (rank 0); each rank has read its
    own files back, so here sizes are enough."""
    assert staged.share.index is not None
    digests = write_index(working, staged.share.index, written)
    digests[META] = write_durably(working / META, staged.meta)
    manifest = CheckpointManifest(staged.step, digests)
    with staged.permit.used():
        write_manifest(working, manifest)
        folders.force(working)
        _check(working, manifest)
        folders.commit(working, final)


def _check(working: Folder, manifest: CheckpointManifest) -> None:
    if read_manifest(working) != manifest:
        raise CheckpointError(
            f"the manifest of step {manifest.step} does not read back as written."
        )
    for name in (INDEX, META):
        check_small(working, name, manifest.files[name])
    try:
        check_sizes(working, manifest)
    except CheckpointError as error:
        raise CheckpointError(f"{error} Every rank must write to the same disk.") from None
