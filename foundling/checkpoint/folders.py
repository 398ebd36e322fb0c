"""Folders of checkpoints: their names, their leftovers, and the run that owns them."""

import contextlib
import json
import os
import re
import shutil
import socket
import uuid
from pathlib import Path

from foundling.checkpoint.remote import F, Folder, RemotePath, write_text
from foundling.config.errors import MissingOrDamagedError, RunError
from foundling.runtime import files
from foundling.runtime.files import fsync_dir, replace_folder, write_text_atomic
from foundling.runtime.run_dir import RunDir

# step-00000123                a checkpoint: on a disk by the rename of a complete folder, in a
#                              store without renames written in place, manifest last
# step-00000123.tmp-4711       being written by process 4711
# step-00000123.old-4711       being deleted by process 4711
# step-00000123.damaged-1      failed its checksums and stood in the way of a new save; kept
# step-00000123.abandoned-1    later than a step to which a rollback went back; kept for a while
# step-00000123.pinned         a file: never delete this step
# step-00000123.score          a file: how good the step was
#
# Steps are compared as numbers: a public trainer sorted such folders as strings and resumed from
# step 9 although step 10 was there. Rejected: a `latest` file or link, which is a second truth that
# a kill can leave pointing at the wrong folder.

MANIFEST = "manifest.json"
"""The marker: a folder without it is no checkpoint, whatever else it holds."""
_CHECKPOINT = re.compile(r"step-(\d+)")
ABANDONED = re.compile(r"step-\d+\.abandoned-\d+")
_LEFTOVER = re.compile(r"step-\d+(?:\.[a-z]+-\d+)?\.(?:tmp|old)-(\d+)")


def step_of(path: Folder) -> int | None:
    """The step a checkpoint folder is named after, also of one still being written."""
    match = _CHECKPOINT.fullmatch(path.name.partition(".")[0])
    return int(match[1]) if match else None


def list_checkpoints(folder: F) -> list[F]:
    """Every folder with a checkpoint's name, oldest step first, whole or not."""
    if isinstance(folder, RemotePath):  # one question to the store, and not one for each name
        entries = folder.entries()
        names = [name for name in entries if entries[name]["type"] == "directory"]
    else:
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        names = [name for name in names if (folder / name).is_dir()]
    found = [folder / name for name in names if _CHECKPOINT.fullmatch(name)]
    return sorted(found, key=lambda path: (step_of(path) or 0, path.name))


def final_path(folder: F, step: int) -> F:
    """Where the checkpoint of `step` belongs."""
    return folder / f"step-{step:08d}"


def working_path(folder: F, step: int) -> F:
    """Where this process writes the checkpoint of `step` before it is whole."""
    if isinstance(folder, RemotePath):
        return final_path(folder, step)
    return folder / f"step-{step:08d}.tmp-{os.getpid()}"


def make_fresh(path: Folder) -> None:
    """An empty folder to write into; what a torn save left under a remote name goes first."""
    if isinstance(path, RemotePath):
        path.remove_all()
        path.store.makedirs(path.path, exist_ok=True)
    else:
        path.mkdir()


def commit(working: F, final: F) -> None:
    """Give a complete folder its name; without renames the manifest in it was the commit."""
    files.failpoint("rename")
    if isinstance(working, Path) and isinstance(final, Path):
        replace_folder(working, final)


def force(folder: Folder) -> None:
    """Make a folder's entries survive a power cut."""
    files.failpoint("fsync")
    if isinstance(folder, Path):
        fsync_dir(folder)


def set_aside(path: F, why: str = "damaged") -> F:
    """Move a checkpoint out of the way; it may still hold something worth saving."""
    number = 1
    while (aside := path.with_name(f"{path.name}.{why}-{number}")).exists():
        number += 1
    if isinstance(path, RemotePath):
        # Copies and deletes; interrupted, the original lacks files and is still no checkpoint.
        path.store.mv(path.path, f"{path.parent.path}/{aside.name}", recursive=True)
    else:
        os.rename(path, path.with_name(aside.name))
        fsync_dir(path.parent)
    return aside


def delete(path: Folder) -> None:
    """Delete a checkpoint so that a kill at any moment leaves nothing that looks like one.

    The rename takes it off the list at once, and the marker goes before the rest for stores that
    cannot rename; what a kill leaves is deleted at the next save.
    """
    files.failpoint("delete")
    if isinstance(path, RemotePath):
        (path / MANIFEST).unlink(missing_ok=True)
        files.failpoint("delete")
        path.remove_all()
        return
    if path.is_symlink():
        path.unlink()  # only the link is ours, not what it points to
        return
    doomed = path.with_name(f"{path.name}.old-{os.getpid()}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    fsync_dir(path.parent)
    files.failpoint("delete")
    (doomed / MANIFEST).unlink(missing_ok=True)
    files.failpoint("delete")
    shutil.rmtree(doomed, ignore_errors=True)


def discard(working: Folder) -> None:
    """Remove what a failed save wrote: it frees the room a full disk needs."""
    with contextlib.suppress(Exception):  # what went wrong before is the news
        if isinstance(working, RemotePath):
            (working / MANIFEST).unlink(missing_ok=True)
            working.remove_all()
        else:
            shutil.rmtree(working)


def sweep(folder: Folder) -> None:
    """Remove what processes that are no more left half written or half deleted.

    Our own number counts as dead: we are not writing now, and in a container every restart may
    have the same number. A number of another machine is covered by the run's lock, under which
    only one job saves. Remote stores have no such names: a torn checkpoint there is cleared when
    its step is saved again, or goes with the old ones.
    """
    if isinstance(folder, RemotePath):
        return
    for path in folder.iterdir():
        match = _LEFTOVER.fullmatch(path.name)
        if match and (int(match[1]) == os.getpid() or not is_alive(int(match[1]))):
            shutil.rmtree(path, ignore_errors=True)


def is_alive(process: int) -> bool:
    """Whether a process of this machine runs, ours or another user's."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


# Whose a folder of checkpoints outside its run is.
#
# Below `checkpoint.folder` a run's checkpoints lie under the run's name, and two runs may have the
# same name: the second would take the first one's steps for its own and delete what its rules do
# not keep. So the folder says whose it is (owner.json), by a number that the run keeps in run.id
# from before its first save: a run that was moved goes on, and any other is refused before it has
# written anything. Rejected: the run's path instead of a number, which changes when a run is moved
# and is the same on every rented machine.

OWNER = "owner.json"
RUN_ID = "run.id"


def lock_folder(run: RunDir, root: Folder) -> None:
    """Make `root` this run's (rank 0, under the run's lock), or refuse and leave all as it is."""
    if root == run.checkpoints:
        return  # inside the run no other run saves
    mine, owner = _run_id(run.path), _read_owner(root)
    if owner is None:
        _refuse_unsaid(run, root, mine)
        mine = mine or uuid.uuid4().hex
        write_text_atomic(run.path / RUN_ID, mine + "\n")
        try:
            _take(root, mine, run.path)
        except OSError as error:
            if not run.exists:  # refused before it began: nothing stays
                (run.path / RUN_ID).unlink(missing_ok=True)
            why = error.strerror or type(error).__name__
            raise RunError(
                f"{root} cannot be written ({why}); give another checkpoint.folder."
            ) from None
        owner = _read_owner(root) or {}
    if owner.get("run") != mine:
        raise RunError(
            f"{root} holds the checkpoints of another run of this name ({_owner_text(owner)}); give"
            " this run another name or another checkpoint.folder."
        )
    there = Path(str(owner.get("path", "")))
    if there == run.path.resolve():
        return
    if owner.get("host") == socket.gethostname() and _run_id(there) == mine:
        raise RunError(
            f"{run.path} is a copy of {there}, and both would save to {root}; go on with that one,"
            f" or begin another with `foundling train --from`."
        )
    write_text(root / OWNER, _text(mine, run.path))


def _refuse_unsaid(run: RunDir, root: Folder, mine: str) -> None:
    """A folder that says nothing is ours if it is empty and we are new, or if we are older than
    the saying."""
    if run.exists and mine:
        raise MissingOrDamagedError(
            f"{root} is not there any more, or has lost its {OWNER}, and {run.path} has saved to"
            " it; bring it back, or give the run its old name if it was renamed."
        )
    if not run.exists and list_checkpoints(root):
        raise RunError(
            f"{root} holds checkpoints that are not of this run; move them away, or give this run"
            " another name or another checkpoint.folder."
        )


def _run_id(run: Path) -> str:
    try:
        return (run / RUN_ID).read_text().strip()
    except OSError:
        return ""


def _read_owner(root: Folder) -> dict[str, str] | None:
    """The owner of a folder; None without an owner file, and a damaged file counts as an owner all
    the same."""
    if not (root / OWNER).exists():
        return None
    try:
        said = json.loads((root / OWNER).read_bytes())
    except (OSError, ValueError):
        said = None
    return said if isinstance(said, dict) else {}


def _take(root: Folder, mine: str, run: Path) -> None:
    """Write the owner file unless another run was faster; the caller reads it again."""
    if isinstance(root, RemotePath):
        write_text(root / OWNER, _text(mine, run))
        return
    root.mkdir(parents=True, exist_ok=True)
    draft = root / f"{OWNER}.{mine}"
    write_text_atomic(draft, _text(mine, run))
    try:
        os.link(draft, root / OWNER)  # unlike a rename it fails where there is one
    except FileExistsError:
        pass
    except OSError:  # a disk without links
        os.replace(draft, root / OWNER)
    draft.unlink(missing_ok=True)


def _text(mine: str, run: Path) -> str:
    said = {"run": mine, "path": str(run.resolve()), "host": socket.gethostname()}
    return json.dumps(said, indent=2) + "\n"


def _owner_text(owner: dict[str, str]) -> str:
    if "path" not in owner:
        return f"its {OWNER} cannot be read"
    return f"{owner['path']} on {owner.get('host', 'another machine')}"
