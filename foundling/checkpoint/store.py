"""Tensors and JSON into a folder that is whole or not there, and back in place.

A save goes: tensors by torch.distributed.checkpoint into a fresh temporary folder, meta.json, every
file forced to the disk, manifest.json, a check of every byte, rename. Killed anywhere before the
rename, the folder has a name nobody reads; after it, the checkpoint is whole. Writing over an old
folder instead leaves 21 of 40 killed saves looking valid and not loading.

With a process group every rank calls `save`; rank 0 prepares, seals and renames, and its outcome,
good or bad, reaches the others before any returns.
"""

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from foundling.checkpoint import folders
from foundling.checkpoint.ranks import is_main, on_main
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
from foundling.checkpoint.tensor_files import read_tensors, write_tensors
from foundling.checkpoint.tensor_index import TensorSpec, read_index, specs_of
from foundling.config import CheckpointError
from foundling.runtime import fsync_dir, replace_folder, warn


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
        kept, temporary = on_main(lambda: _prepare(folder, step))
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
    try:
        read_tensors(path, index, into)
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
        seals = write_tensors(temporary, tensors)
        on_main(lambda: _finish(temporary, final, step, seals, meta, tensors.keys()))
    except BaseException:
        # Also frees the room a full disk needs; nobody would ever read it.
        if is_main():
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _finish(
    temporary: Path,
    final: Path,
    step: int,
    seals: Mapping[str, FileSeal],
    meta: bytes,
    names: Collection[str],
) -> None:
    """Seal the folder, check it and give it its name (rank 0)."""
    seals = {**seals, META: write_durably(temporary / META, meta)}
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
