"""Tensors and JSON into a folder that is whole or not there, and back in place.

A save goes: a copy of the tensors on the host, their files into a fresh temporary folder, the
index, meta.json, every file forced to the disk and read back, manifest.json, rename. Killed
anywhere before the rename, the folder has a name nobody reads; after it, the checkpoint is whole.
Writing over an old folder instead leaves 21 of 40 killed saves looking valid and not loading. A
remote folder cannot be renamed: there the manifest, put last, is what makes it a checkpoint.

With a process group every rank takes part; rank 0 prepares, seals and renames, and its outcome,
good or bad, reaches the others before any returns. `Saver` does the same behind the training.
"""

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from foundling.checkpoint import folders
from foundling.checkpoint.ranks import Group, conclude, is_main, my_part, on_main
from foundling.checkpoint.remote import F, Folder, RemotePath
from foundling.checkpoint.seal import (
    META,
    Seal,
    check_sizes,
    check_small,
    merge,
    read_seal,
    verify,
    write_durably,
    write_seal,
)
from foundling.checkpoint.stage import Stage
from foundling.checkpoint.tensor_files import (
    Copies,
    Written,
    read_tensors,
    write_files,
    write_index,
)
from foundling.checkpoint.tensor_index import INDEX, TensorSpec, read_index, specs_of
from foundling.checkpoint.tensor_plan import Planner, Share
from foundling.config import CheckpointError
from foundling.runtime import warn


class Permit:
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
class Staged:
    """Everything a save needs, cut loose from the training."""

    step: int
    meta: bytes
    share: Share
    copies: Copies
    failure: Exception | None = None
    """Why this rank has nothing to write; the other ranks must hear of it."""
    permit: Permit = field(default_factory=Permit)


def save(folder: F, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> F:
    """Write the checkpoint of `step` into `folder` and return its path.

    A whole checkpoint of that step is kept as it is; a damaged one is moved aside first.
    """
    content = checked_meta(step, tensors, meta)
    planner, stage = Planner(), Stage()
    sight = planner.look(tensors)
    share = planner.agree(sight, None)
    try:
        copies = stage.fill({item.index: sight.piece(item) for item in share.items})
        return write(folder, Staged(step, content, share, copies))
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


def write(folder: F, staged: Staged, group: Group = None) -> F:
    """Make a checkpoint of what was staged; every rank of `group` must call it."""
    final = folders.final_path(folder, staged.step)
    try:
        kept, working = on_main(lambda: _prepare(folder, staged.step), group)
        if kept is not None:
            return folder / kept
        _write(folder / working, final, staged, group)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of step {staged.step} could not be written to {folder}: "
            f"{error.strerror or error}; make room there, earlier checkpoints are untouched."
        ) from error
    return final


def tensor_specs(path: Folder) -> dict[str, TensorSpec]:
    """Shape and dtype of every tensor in a checkpoint, without reading the tensors."""
    return specs_of(read_index(path))


def check_fit(path: Folder, into: Mapping[str, Tensor]) -> None:
    """Refuse what `load_tensors` would refuse by name or shape, without reading the tensors."""
    _match(path, tensor_specs(path), into)


def checkpoint_bytes(path: Folder) -> int:
    """Size of a checkpoint by its manifest."""
    return read_seal(path).size


def load_tensors(
    path: Folder, into: Mapping[str, Tensor], *, prefix: str = "", check: bool = True
) -> None:
    """Fill the tensors of `into` in place from a checkpoint that must have exactly their names.

    Plain tensors and DTensors of any layout: each rank reads the pieces it holds. Only stored names
    that begin with `prefix` count. `check=False` is for a path that `latest` or `verify` has just
    passed: the checksums are then not computed twice.
    """
    if check:
        verify(path)
    index = read_index(path)
    stored = {name: spec for name, spec in specs_of(index).items() if name.startswith(prefix)}
    _match(path, stored, into)
    if not into:
        return
    try:
        read_tensors(path, index, into)
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {path} could not be loaded: {' '.join(str(error).split())}."
        ) from error


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


def _write(working: F, final: F, staged: Staged, group: Group) -> None:
    def mine() -> Written:
        if staged.failure is not None:
            raise staged.failure
        if isinstance(working, Path) and not working.is_dir():
            raise CheckpointError(
                f"rank {my_part()[0]} does not see {working}; checkpoints of several machines need"
                " a disk that all of them share."
            )
        return write_files(working, staged.share.files, staged.copies)

    try:
        conclude(mine, lambda written: _finish(working, final, staged, written), group)
    except BaseException:
        # Also frees the room a full disk needs; nobody would ever read it.
        if is_main():
            folders.discard(working)
        raise


def _finish(working: F, final: F, staged: Staged, written: list[Written]) -> None:
    """Seal the folder, check it and give it its name (rank 0); each rank has read its own files
    back, so here sizes are enough."""
    assert staged.share.index is not None
    seals = merge(share.seals for share in written)
    seals[INDEX] = write_index(working, staged.share.index, written)
    seals[META] = write_durably(working / META, staged.meta)
    seal = Seal(staged.step, seals)
    with staged.permit.used():
        write_seal(working, seal)
        folders.force(working)
        _check(working, seal)
        folders.commit(working, final)


def _check(working: Folder, seal: Seal) -> None:
    if read_seal(working) != seal:
        raise CheckpointError(f"the manifest of step {seal.step} does not read back as written.")
    for name in (INDEX, META):
        check_small(working, name, seal.files[name])
    try:
        check_sizes(working, seal)
    except CheckpointError as error:
        raise CheckpointError(f"{error} Every rank must write to the same disk.") from None


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
