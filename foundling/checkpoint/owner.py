"""Whose a folder of checkpoints outside its run is.

Below `checkpoint.folder` a run's checkpoints lie under the run's name, and two runs may have the
same name: the second would take the first one's steps for its own and delete what its rules do not
keep. So the folder says whose it is (owner.json), by a number that the run keeps in run.id from
before its first save: a run that was moved goes on, and any other is refused before it has written
anything. Rejected: the run's path instead of a number, which changes when a run is moved and is the
same on every rented machine.
"""

import json
import os
import socket
import uuid
from pathlib import Path

from foundling.checkpoint.folders import list_checkpoints
from foundling.checkpoint.remote import Folder, RemotePath
from foundling.config.errors import LostError, RunError
from foundling.runtime.files import write_text_atomic
from foundling.runtime.rundir import RunDir

OWNER = "owner.json"
RUN_ID = "run.id"


def claim(run: RunDir, home: Folder) -> None:
    """Make `home` this run's (rank 0, under the run's lock), or refuse and leave all as it is."""
    if home == run.checkpoints:
        return  # inside the run nobody else looks
    mine, owner = _run_id(run.path), _read_owner(home)
    if owner is None:
        _refuse_unsaid(run, home, mine)
        mine = mine or uuid.uuid4().hex
        write_text_atomic(run.path / RUN_ID, mine + "\n")
        try:
            _take(home, mine, run.path)
        except OSError as error:
            if not run.exists:  # refused before it began: nothing stays
                (run.path / RUN_ID).unlink(missing_ok=True)
            why = error.strerror or type(error).__name__
            raise RunError(
                f"{home} cannot be written ({why}); give another checkpoint.folder."
            ) from None
        owner = _read_owner(home) or {}
    if owner.get("run") != mine:
        raise RunError(
            f"{home} holds the checkpoints of another run of this name ({_told(owner)}); give this"
            " run another name or another checkpoint.folder."
        )
    there = Path(str(owner.get("path", "")))
    if there == run.path.resolve():
        return
    if owner.get("host") == socket.gethostname() and _run_id(there) == mine:
        raise RunError(
            f"{run.path} is a copy of {there}, and both would save to {home}; go on with that one,"
            f" or begin another with `foundling train --from`."
        )
    _write(home / OWNER, _text(mine, run.path))


def _refuse_unsaid(run: RunDir, home: Folder, mine: str) -> None:
    """A folder that says nothing is ours if it is empty and we are new, or if we are older than
    the saying."""
    if run.exists and mine:
        raise LostError(
            f"{home} is not there any more, or has lost its {OWNER}, and {run.path} has saved to"
            " it; bring it back, or give the run its old name if it was renamed."
        )
    if not run.exists and list_checkpoints(home):
        raise RunError(
            f"{home} holds checkpoints that are not of this run; move them away, or give this run"
            " another name or another checkpoint.folder."
        )


def _run_id(run: Path) -> str:
    try:
        return (run / RUN_ID).read_text().strip()
    except OSError:
        return ""


def _read_owner(home: Folder) -> dict[str, str] | None:
    """What the folder says; None if it says nothing, and a damaged word is somebody's all the
    same."""
    if not (home / OWNER).exists():
        return None
    try:
        said = json.loads((home / OWNER).read_bytes())
    except (OSError, ValueError):
        said = None
    return said if isinstance(said, dict) else {}


def _take(home: Folder, mine: str, run: Path) -> None:
    """Write the word unless somebody was faster; the caller reads it again."""
    if isinstance(home, RemotePath):
        _write(home / OWNER, _text(mine, run))
        return
    home.mkdir(parents=True, exist_ok=True)
    draft = home / f"{OWNER}.{mine}"
    write_text_atomic(draft, _text(mine, run))
    try:
        os.link(draft, home / OWNER)  # unlike a rename it fails where there is one
    except FileExistsError:
        pass
    except OSError:  # a disk without links
        os.replace(draft, home / OWNER)
    draft.unlink(missing_ok=True)


def _write(path: Folder, text: str) -> None:
    if isinstance(path, RemotePath):
        path.write_bytes(text.encode())
    else:
        write_text_atomic(path, text)


def _text(mine: str, run: Path) -> str:
    said = {"run": mine, "path": str(run.resolve()), "host": socket.gethostname()}
    return json.dumps(said, indent=2) + "\n"


def _told(owner: dict[str, str]) -> str:
    if "path" not in owner:
        return f"its {OWNER} cannot be read"
    return f"{owner['path']} on {owner.get('host', 'another machine')}"
