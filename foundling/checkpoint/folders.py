"""Names of checkpoint folders: which are checkpoints, which are leftovers, and who may be swept.

    step-00000123                a checkpoint; only ever put there by a rename of a sealed folder
    step-00000123.tmp-4711       being written by process 4711
    step-00000123.old-4711       being deleted by process 4711
    step-00000123.damaged-1      failed its checksums and stood in the way of a new save; kept

Steps are compared as numbers: 002 once sorted such folders as strings and resumed from step 9
although step 10 was there. Rejected: a `latest` file or link, which is a second truth that a kill
can leave pointing at the wrong folder.
"""

import os
import re
import shutil
from pathlib import Path

from foundling.runtime import fsync_dir

_CHECKPOINT = re.compile(r"step-(\d+)")
_LEFTOVER = re.compile(r"step-\d+\.(?:tmp|old)-(\d+)")


def step_of(path: Path) -> int | None:
    """The step a checkpoint folder is named after, also of one still being written."""
    match = _CHECKPOINT.fullmatch(path.name.partition(".")[0])
    return int(match[1]) if match else None


def list_checkpoints(folder: Path) -> list[Path]:
    """Every folder with a checkpoint's name, oldest step first, whole or not."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name)]
    return sorted((path for path in found if path.is_dir()), key=lambda path: (step_of(path), path))


def final_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` belongs."""
    return folder / f"step-{step:08d}"


def temporary_path(folder: Path, step: int) -> Path:
    """Where this process writes the checkpoint of `step` before it is whole."""
    return folder / f"step-{step:08d}.tmp-{os.getpid()}"


def set_aside(path: Path) -> Path:
    """Move a damaged checkpoint out of the way; it may still hold something worth saving."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    os.rename(path, aside)
    fsync_dir(path.parent)
    return aside


def delete(path: Path, marker: str) -> None:
    """Delete a checkpoint so that a kill at any moment leaves nothing that looks like one.

    The rename takes it off the list at once, and the marker goes before the rest for stores that
    cannot rename; what a kill leaves behind is swept at the next save.
    """
    doomed = path.with_name(f"{path.name}.old-{os.getpid()}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    fsync_dir(path.parent)
    (doomed / marker).unlink(missing_ok=True)
    shutil.rmtree(doomed, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what processes that are no more left half written or half deleted.

    Our own number counts as dead: we are not writing now, and in a container every restart may
    have the same number. A number of another machine is covered by the run's lock, under which
    only one job saves.
    """
    for path in folder.iterdir():
        match = _LEFTOVER.fullmatch(path.name)
        if match and (int(match[1]) == os.getpid() or not _is_alive(int(match[1]))):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
