"""Throwing a run away without losing it: it is moved, by one rename, into a folder beside it.

    runs/.trash/NAME--20260101-120000/     the run as it was, with trash.json saying where from

003 lost a run to `rm`. Only `runs trash empty` deletes, by age, and a finished run only when it is
asked for by that word.
"""

import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundling.config.errors import ConfigError, RunError
from foundling.runtime.files import fsync_dir, write_text_atomic
from foundling.runtime.lock import is_locked, read_holder
from foundling.runtime.rundir import RunDir

TRASH = ".trash"
NOTE = "trash.json"
_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True)
class Trashed:
    """One run in the trash."""

    path: Path
    origin: Path
    since: float
    status: str


def throw_away(run: Path) -> Path:
    """Move a run into the trash; where it is now."""
    run = Path(os.path.abspath(run))  # a link is moved, not what it points to
    info = _own_info(RunDir(run))
    if is_locked(run):
        raise RunError(f"{run} is in use by {read_holder(run)}; stop it first.")
    if (running := _running_children(run)) is not None:
        raise RunError(f"{run} is the parent of {running}, which is running; wait for it.")
    now = time.time()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    trash = run.parent / TRASH
    place = trash / f"{run.name}--{stamp}"
    number = 1
    while place.exists():
        number += 1
        place = trash / f"{run.name}--{stamp}-{number}"
    trash.mkdir(exist_ok=True)
    status = info.get("status", "unknown")
    if status == "running":
        status = "stopped"  # nobody holds its lock: killed or interrupted
    note = {"origin": str(run), "since": now, "status": status}
    write_text_atomic(run / NOTE, json.dumps(note) + "\n")
    os.rename(run, place)
    fsync_dir(run.parent)
    return place


def _own_info(run: RunDir) -> dict[str, Any]:
    """run.json of what is thrown away: a run, a damaged one, or the rest of a start that was cut
    off before run.json. A folder with anything of somebody else's in it is refused."""
    if info := _info(run):
        return info
    others = run.other_files()
    if run.exists and others:
        raise RunError(
            f"{run.info_path} is not of a run of ours, and beside it stands {others[0]}; move it"
            " away yourself."
        )
    if not run.exists and (others or not run.path.is_dir() or not any(run.path.iterdir())):
        run.require()
    return {}


def _info(run: RunDir) -> dict[str, Any]:
    """run.json as far as it can be read: a damaged run may be thrown away too."""
    try:
        return run.read_info()
    except RunError:
        return {}


def _running_children(run: Path) -> Path | None:
    for note in run.parent.glob("*/run.json"):
        child = RunDir(note.parent)
        stated = _info(child).get("parent")
        name = Path(stated["path"]).name if isinstance(stated, dict) else ""
        if name == run.name and child.path != run and is_locked(child.path):
            return child.path
    return None


def list_trash(folder: Path) -> list[Trashed]:
    """What was thrown away from `folder` and the folders below it, oldest first."""
    found = []
    for note in sorted(folder.rglob(f"{TRASH}/*/{NOTE}")):
        try:
            said = json.loads(note.read_text())
            found.append(Trashed(note.parent, Path(said["origin"]), said["since"], said["status"]))
        except (ValueError, KeyError):
            continue
    return sorted(found, key=lambda trashed: trashed.since)


def restore(wanted: Path, folder: Path) -> Path:
    """Bring a run back to where it was: by its path in the trash, or the newest of its old name."""
    entries = list_trash(folder)
    if (wanted / NOTE).is_file():
        entries = list_trash(wanted.resolve().parent.parent)
    fits = [
        entry
        for entry in entries
        if entry.path.resolve() == wanted.resolve()
        or entry.path.name == wanted.name
        or entry.origin == Path(os.path.abspath(wanted))
        or (entry.origin.name == str(wanted))
    ]
    if not fits:
        names = ", ".join(entry.origin.name for entry in entries) or "nothing"
        raise RunError(f"{wanted} is not in the trash of {folder}; there is {names}.")
    entry = fits[-1]
    # The trash may have been moved together with the runs: back means beside it.
    home = entry.path.resolve().parent.parent / entry.origin.name
    if home.exists():
        raise RunError(f"{home} exists again; move it away before {entry.path} can come back.")
    os.rename(entry.path, home)
    (home / NOTE).unlink(missing_ok=True)
    fsync_dir(home.parent)
    return home


def empty_trash(
    folder: Path, older_than_s: float, *, finished: bool
) -> tuple[list[Trashed], list[Trashed]]:
    """Delete what was thrown away long enough ago; (deleted, kept because it is finished)."""
    old = [e for e in list_trash(folder) if time.time() - e.since >= older_than_s]
    kept = [e for e in old if e.status == "finished" and not finished]
    deleted = [e for e in old if e not in kept]
    for entry in deleted:
        if entry.path.is_symlink():
            entry.path.unlink()
        else:
            shutil.rmtree(entry.path)
    return deleted, kept


def age(text: str) -> float:
    """Seconds of 30d, 12h, 2w or 45m."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text)
    if not match:
        raise ConfigError(f"{text} is no age; write 30d, 12h, 2w or 45m.")
    return float(match[1]) * _UNITS[match[2]]
