"""Snapshot of a GPU's memory at the moment it runs out: which lines of code hold how much.

The allocator's own observer takes it at the moment of the failure: by the time an exception
is caught, the frames that held the tensors are gone. Where no history was recorded the snapshot has
the blocks and their sizes without the lines that asked for them. Nothing is done on a CPU, whose
memory ends with the kernel killing the process.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from foundling.config.errors import RunError
from foundling.config.train import TrainConfig
from foundling.runtime.device import translate_out_of_memory

HISTORY = 200_000
"""Allocations whose origin is kept where history is recorded."""


class OutOfMemoryLaterError(torch.OutOfMemoryError):
    """Memory ran out in a run whose steps had fitted before: a restart may cure that."""


class _SnapshotTarget:
    """The file of the next snapshot; None: no snapshot is taken."""

    path: Path | None = None
    is_attached = False


def _observe(device: int, *_: object) -> None:
    """Called by the allocator when a request cannot be met; it must never raise."""
    if _SnapshotTarget.path is None:
        return
    with contextlib.suppress(Exception):
        _SnapshotTarget.path.parent.mkdir(parents=True, exist_ok=True)
        dump_snapshot(_SnapshotTarget.path)


def dump_snapshot(path: Path) -> None:
    """Write what CUDA's allocator holds, for pytorch.org/memory_viz, by the calls that torch
    documents for it, private as their names are."""
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


def _attach() -> None:
    attach: Callable[[Any], None] | None = getattr(
        torch._C, "_cuda_attach_out_of_memory_observer", None
    )
    if _SnapshotTarget.is_attached or attach is None or not torch.cuda.is_available():
        return
    torch.cuda.init()  # type: ignore[no-untyped-call]  # the observer hangs on the allocator, which is made here
    attach(_observe)
    _SnapshotTarget.is_attached = True


@contextlib.contextmanager
def snapshot_on_oom(folder: Path) -> Iterator[None]:
    """Write FOLDER/oom-rankN.pickle when memory runs out in here; the error is raised again with a
    note that names the file (`snapshot_note` reads it)."""
    _attach()
    before = _SnapshotTarget.path
    _SnapshotTarget.path = folder / f"oom-rank{os.environ.get('RANK', '0')}.pickle"
    try:
        with translate_out_of_memory():
            yield
    except torch.OutOfMemoryError as error:
        if (path := _SnapshotTarget.path).is_file():
            error.add_note(f"a snapshot of it is in {path}: look at it on pytorch.org/memory_viz.")
        raise
    finally:
        _SnapshotTarget.path = before


@contextlib.contextmanager
def refuse_on_oom(train: TrainConfig, remedy: str = "lower train.batch_size") -> Iterator[None]:
    """One sentence where not even the first step fits: started again, it would end the same."""
    try:
        yield
    except OutOfMemoryLaterError:
        raise
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"a step of {train.batch_size} rows of {train.seq_len} tokens does not fit"
            f" into the device's memory; {remedy}, set parallel.recompute, or see `foundling plan`"
            f"{snapshot_note(error) or '.'}"
        ) from error


@contextlib.contextmanager
def mark_oom_after_success(has_fitted: Callable[[], bool]) -> Iterator[None]:
    """Raise OutOfMemoryLaterError where memory runs out and a step `has_fitted` before."""
    try:
        with translate_out_of_memory():
            yield
    except torch.OutOfMemoryError as error:
        if not has_fitted():
            raise
        raise OutOfMemoryLaterError(f"after steps that had fitted: {error}") from error


def snapshot_note(error: BaseException) -> str:
    """The note of `snapshot_on_oom` on an error, as the end of a sentence."""
    return next((f"; {note}" for note in getattr(error, "__notes__", []) if "snapshot" in note), "")


@contextlib.contextmanager
def record_history(device: torch.device) -> Iterator[None]:
    """Record the lines of code that allocate memory, for snapshots taken in here."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=HISTORY)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
