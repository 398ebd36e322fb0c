"""From words on the command line to a run and one of its checkpoints."""

import re
from pathlib import Path

from foundling.checkpoint import folders
from foundling.checkpoint.keep import latest, latest_together, verify_together
from foundling.checkpoint.remote import Folder, open_folder
from foundling.checkpoint.seal import check_sizes, read_seal, verify
from foundling.config import CheckpointConfig, CheckpointError, RunConfig, RunError
from foundling.runtime import RunDir

MODEL_PREFIX = "model."


def find_checkpoint(
    path: str | Path, *, together: bool = False, hashed: bool = True
) -> tuple[RunDir, Folder]:
    """The run and the verified checkpoint that RUN, RUN@STEP or RUN/checkpoints/step-N means.

    With `together` every rank of the job calls it, and each hashes its part of the files. With
    `hashed` off only names and sizes were compared, and the newest is taken for whole.
    """
    check = (verify_together if together else verify) if hashed else _check_sizes
    place = Path(path)
    at_step = re.fullmatch(r"(.+)@(\d+)", str(path))
    if at_step and not place.exists():
        run = RunDir(at_step[1]).require()
        chosen = checkpoint_of_step(home_of(run), int(at_step[2]))
        check(chosen)
        return run, chosen
    if not place.exists():
        raise RunError(f"{path} does not exist; give a run directory or RUN@STEP.")
    if folders.step_of(place) is not None and place.resolve().parent.name == "checkpoints":
        run = RunDir(place.resolve().parent.parent).require()
        check(place)
        return run, place
    run = RunDir(place).require()
    home = home_of(run)
    if hashed:
        newest = latest_together(home) if together else latest(home)
    else:
        newest = next(reversed(folders.list_checkpoints(home)), None)
    if newest is None:
        if there := [one.name for one in folders.list_checkpoints(home)]:
            raise CheckpointError(
                f"{path} has no whole checkpoint: {', '.join(there)} {'are' if there[1:] else 'is'}"
                " damaged; bring one back from a copy."
            )
        raise CheckpointError(f"{path} has no whole checkpoint yet; train it first.")
    if not hashed:
        check(newest)
    return run, newest


def _check_sizes(path: Folder) -> None:
    check_sizes(path, read_seal(path))


def run_of(path: str | Path) -> RunDir:
    """The run that RUN, RUN@STEP or RUN/checkpoints/step-N belongs to; nothing is verified."""
    place = Path(path)
    at_step = re.fullmatch(r"(.+)@(\d+)", str(path))
    if at_step and not place.exists():
        return RunDir(at_step[1]).require()
    if folders.step_of(place) is not None and place.resolve().parent.name == "checkpoints":
        return RunDir(place.resolve().parent.parent).require()
    return RunDir(place).require()


def checkpoint_home(run_checkpoints: Path, config: CheckpointConfig) -> Folder:
    """Where a run's checkpoints are: in the run, or in a folder named after it elsewhere."""
    if not config.folder:
        return run_checkpoints
    name = run_checkpoints.resolve().parent.name
    return open_folder(config.folder) / name


def home_of(run: RunDir) -> Folder:
    """Where a run keeps its checkpoints."""
    if not run.config_path.is_file():
        return run.checkpoints
    return checkpoint_home(run.checkpoints, run_config(run).checkpoint)


def checkpoint_of_step(home: Folder, step: int) -> Folder:
    """The checkpoint of a step, as it is; the steps there are where it is not."""
    present = folders.list_checkpoints(home)
    for path in present:
        if folders.step_of(path) == step:
            return path
    steps = ", ".join(str(folders.step_of(path)) for path in present) or "none"
    raise CheckpointError(f"{home} has no checkpoint of step {step}; there are: {steps}.")


def run_config(run: RunDir) -> RunConfig:
    """The config that a run was trained with."""
    # Needs jsonargparse, which training processes that never load a bundle should not pay for.
    from foundling.config.resolve import load_run_config

    return load_run_config(run.config_path)
