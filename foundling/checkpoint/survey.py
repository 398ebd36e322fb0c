"""What lies in a folder of checkpoints, for people: whole, damaged and why, pinned, how good."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from foundling.checkpoint import folders
from foundling.checkpoint.bundle_paths import checkpoint_of_step, home_of
from foundling.checkpoint.keep import pinned, scores
from foundling.checkpoint.remote import Folder, describe, open_folder
from foundling.checkpoint.seal import check_sizes, read_seal, verify
from foundling.config import CheckpointError, RunError
from foundling.runtime import RunDir

State = Literal["whole", "sealed", "damaged", "leftover"]


@dataclass(frozen=True)
class Sighting:
    """One folder that is or was to be a checkpoint."""

    step: int
    path: Folder
    state: State
    """whole: every byte checked; sealed: names and sizes are right; leftover: half written or half
    deleted, set aside or abandoned."""
    bytes: int = 0
    reason: str = ""
    """What is wrong with it."""
    pinned: bool = False
    score: float | None = None


def survey(folder: Folder, *, thorough: bool = False) -> Iterator[Sighting]:
    """Every checkpoint of a folder, oldest first, then what is left over; `thorough` reads them."""
    if not folder.is_dir():
        return
    found = folders.list_checkpoints(folder)
    for path in found:
        yield examine(path, thorough=thorough)
    for name, entry in sorted(describe(folder).items()):
        step = folders.step_of(folder / name)
        if step is not None and folder / name not in found and entry.kind == "directory":
            reason = f"{folder / name} is no checkpoint, or none any more"
            yield Sighting(step, folder / name, "leftover", reason=reason)


def examine(path: Folder, *, thorough: bool) -> Sighting:
    """One checkpoint; `thorough` compares every byte with the checksums."""
    state: State = "whole" if thorough else "sealed"
    size, reason = 0, ""
    step = folders.step_of(path)
    try:
        seal = verify(path) if thorough else read_seal(path)
        check_sizes(path, seal)
        step, size = seal.step, seal.size
    except (CheckpointError, OSError) as error:
        state, reason = "damaged", str(error)
    step = step or 0
    return Sighting(
        step, path, state, size, reason, step in pinned(path.parent), scores(path.parent).get(step)
    )


def check_target(target: str, *, all_of_them: bool) -> Iterator[Sighting]:
    """Read the newest checkpoint of a run, all of them, or the one that is named."""
    if (named := _named(target)) is not None:
        yield examine(named, thorough=True)
        return
    home = home_of_target(target)
    found = folders.list_checkpoints(home)
    if not found:
        raise CheckpointError(f"{target} has no checkpoints yet; train it first.")
    for path in found if all_of_them else found[-1:]:
        yield examine(path, thorough=True)


def home_of_target(target: str) -> Folder:
    """The folder of checkpoints that a run, a folder or an address means."""
    if "://" in target:
        return open_folder(target)
    run = RunDir(target)
    if run.exists:
        return home_of(run)
    if folders.list_checkpoints(run.path):
        return run.path
    return home_of(run.require())


def named_checkpoint(target: str) -> tuple[Folder, int]:
    """Folder and step of the one checkpoint that RUN@STEP or a path names; it need not be whole."""
    path = _named(target)
    step = folders.step_of(path) if path is not None else None
    if path is None or step is None:
        raise RunError(f"{target} names no checkpoint; write RUN@STEP or RUN/checkpoints/step-N.")
    return path.parent, step


def _named(target: str) -> Folder | None:
    """The checkpoint itself, if it is one that is named and not a run."""
    at_step = re.fullmatch(r"(.+)@(\d+)", target)
    if at_step and not Path(target).exists():
        return checkpoint_of_step(home_of_target(at_step[1]), int(at_step[2]))
    place = open_folder(target)
    is_one = folders.step_of(place) is not None or (place / folders.MANIFEST).exists()
    return place if is_one and place.is_dir() else None
