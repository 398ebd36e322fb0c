"""From the words of a user to a run and a checkpoint, and a list of the checkpoints that there
are."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from foundling.checkpoint import folders
from foundling.checkpoint.manifest import check_sizes, read_manifest, verify
from foundling.checkpoint.remote import Folder, describe, open_folder
from foundling.checkpoint.retention import latest, latest_together, pinned, scores, verify_together
from foundling.config.errors import CheckpointError, RunError
from foundling.config.run import CheckpointConfig
from foundling.runtime.run_dir import RunDir, split_step

State = Literal["whole", "unverified", "damaged", "leftover"]


@dataclass(frozen=True)
class CheckpointEntry:
    """One folder that is or was to be a checkpoint."""

    step: int
    path: Folder
    state: State
    """whole: every byte checked; unverified: names and sizes are right; leftover: half written or
    half deleted, set aside or abandoned."""
    bytes: int = 0
    reason: str = ""
    """What is wrong with it."""
    pinned: bool = False
    score: float | None = None


def list_entries(folder: Folder, *, thorough: bool = False) -> Iterator[CheckpointEntry]:
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
            yield CheckpointEntry(step, folder / name, "leftover", reason=reason)


def examine(path: Folder, *, thorough: bool) -> CheckpointEntry:
    """One checkpoint; `thorough` compares every byte with the checksums."""
    state: State = "whole" if thorough else "unverified"
    size, reason = 0, ""
    step = folders.step_of(path)
    try:
        manifest = verify(path) if thorough else read_manifest(path)
        check_sizes(path, manifest)
        step, size = manifest.step, manifest.size
    except (CheckpointError, OSError) as error:
        state, reason = "damaged", str(error)
    step = step or 0
    return CheckpointEntry(
        step, path, state, size, reason, step in pinned(path.parent), scores(path.parent).get(step)
    )


def check_target(target: str, *, all_of_them: bool) -> Iterator[CheckpointEntry]:
    """Read the newest checkpoint of a run, all of them, or the one that is named."""
    if (named := _named(target)) is not None:
        yield examine(named, thorough=True)
        return
    root = checkpoint_root_of_target(target)
    found = folders.list_checkpoints(root)
    if not found:
        raise CheckpointError(f"{target} has no checkpoints yet; train it first.")
    for path in found if all_of_them else found[-1:]:
        yield examine(path, thorough=True)


def checkpoint_root_of_target(target: str) -> Folder:
    """The folder of checkpoints that a run, a folder or an address means."""
    if "://" in target:
        return open_folder(target)
    run = RunDir(target)
    if run.exists:
        return checkpoint_root_of(run)
    if folders.list_checkpoints(run.path):
        return run.path
    return checkpoint_root_of(run.require())


def named_checkpoint(target: str) -> tuple[Folder, int]:
    """Folder and step of the one checkpoint that RUN@STEP or a path names; it need not be whole."""
    path = _named(target)
    step = folders.step_of(path) if path is not None else None
    if path is None or step is None:
        raise RunError(f"{target} names no checkpoint; write RUN@STEP or RUN/checkpoints/step-N.")
    return path.parent, step


def _named(target: str) -> Folder | None:
    """The checkpoint itself, if it is one that is named and not a run."""
    if (at_step := split_step(target)) is not None:
        return checkpoint_of_step(checkpoint_root_of_target(at_step[0]), at_step[1])
    place = open_folder(target)
    is_one = folders.step_of(place) is not None or (place / folders.MANIFEST).exists()
    return place if is_one and place.is_dir() else None


# From words on the command line to a run and one of its checkpoints.

MODEL_PREFIX = "model."


def find_checkpoint(path: str | Path, *, together: bool = False) -> tuple[RunDir, Folder]:
    """The run and the verified checkpoint that RUN, RUN@STEP or RUN/checkpoints/step-N means.

    With `together` every rank of the job calls it, and each hashes its part of the files.
    """
    if not Path(path).exists() and split_step(path) is None:
        raise RunError(f"{path} does not exist; give a run directory or RUN@STEP.")
    run, named = _parsed(path)
    if isinstance(named, int):
        named = checkpoint_of_step(checkpoint_root_of(run), named)
    if named is not None:
        (verify_together if together else verify)(named)
        return run, named
    root = checkpoint_root_of(run)
    newest = latest_together(root) if together else latest(root)
    if newest is not None:
        return run, newest
    if there := [one.name for one in folders.list_checkpoints(root)]:
        raise CheckpointError(
            f"{path} has no whole checkpoint: {', '.join(there)} {'are' if there[1:] else 'is'}"
            " damaged; bring one back from a copy."
        )
    raise CheckpointError(f"{path} has no whole checkpoint yet; train it first.")


def run_of(path: str | Path) -> RunDir:
    """The run that RUN, RUN@STEP or RUN/checkpoints/step-N belongs to; nothing is verified."""
    return _parsed(path)[0]


def _parsed(path: str | Path) -> tuple[RunDir, int | Folder | None]:
    """The run, and the step or the folder of a checkpoint where one is named."""
    place = Path(path)
    if (at_step := split_step(path)) is not None:
        return RunDir(at_step[0]).require(), at_step[1]
    if folders.step_of(place) is not None and place.resolve().parent.name == "checkpoints":
        return RunDir(place.resolve().parent.parent).require(), place
    return RunDir(place).require(), None


def checkpoint_root(run_checkpoints: Path, config: CheckpointConfig) -> Folder:
    """Where a run's checkpoints are: in the run, or in a folder named after it elsewhere."""
    if not config.folder:
        return run_checkpoints
    name = run_checkpoints.resolve().parent.name
    return open_folder(config.folder) / name


def checkpoint_root_of(run: RunDir) -> Folder:
    """Where a run keeps its checkpoints."""
    from foundling.config.load import load_run_config

    if not run.config_path.is_file():
        return run.checkpoints
    return checkpoint_root(run.checkpoints, load_run_config(run.config_path).checkpoint)


def checkpoint_of_step(root: Folder, step: int) -> Folder:
    """The checkpoint of a step, as it is; the steps there are where it is not."""
    present = folders.list_checkpoints(root)
    for path in present:
        if folders.step_of(path) == step:
            return path
    steps = ", ".join(str(folders.step_of(path)) for path in present) or "none"
    raise CheckpointError(f"{root} has no checkpoint of step {step}; there are: {steps}.")
