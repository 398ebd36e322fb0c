"""Files of runs: copied to or from another machine by rsync, moved to the trash, restored."""

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from foundling.config.errors import CheckpointError, ConfigError, RunError
from foundling.runtime.console import say, warn
from foundling.runtime.files import fsync_dir, write_text_atomic
from foundling.runtime.lock import is_locked, read_holder
from foundling.runtime.run_dir import RunDir

# Copying a run to or from another machine, so that it can be broken off and checked at the end.
#
# rsync does it, and goes on where it was broken off. A checkpoint's manifest comes after its files,
# so that a folder that has one is complete. At the end the checkpoints on this machine are compared
# with their manifests, and after a push rsync compares the checksums of both sides. Rejected: scp,
# which verifies nothing.

# What belongs to the other machine's processes, or is half written or half deleted there.
LEFT_OUT = ("lock", "lock.*", "step-*.tmp-*", "step-*.old-*", "*.part", "*.tmp-*", ".trash")


@dataclass(frozen=True)
class Remote:
    """A folder on another machine."""

    host: str
    path: str

    def __str__(self) -> str:
        return f"{self.host}:{self.path}"


def parse_remote(text: str) -> Remote:
    """HOST:PATH as scp writes it."""
    host, colon, path = text.partition(":")
    if not colon or not host or not path or "/" in host or host.startswith("-"):
        raise ConfigError(f"{text} is no place on another machine; write HOST:PATH.")
    return Remote(host, path.rstrip("/") or "/")


def copy_run(source: str, target: str) -> Path | Remote:
    """Copy a run into a folder, one of the two on another machine; verified where it arrived."""
    if _is_remote(source) == _is_remote(target):
        where = "other machines" if _is_remote(source) else "this machine"
        raise ConfigError(
            f"{source} and {target} are both on {where}; write HOST:PATH for one of them, and a"
            " path of this machine for the other."
        )
    if _is_remote(source):
        return pull(parse_remote(source), Path(target))
    return push(Path(source), parse_remote(target))


def _is_remote(text: str) -> bool:
    """HOST:PATH, and not a path here with a colon in its name."""
    host, colon, _ = text.partition(":")
    return bool(colon) and "/" not in host and not Path(text).exists()


def pull(source: Remote, folder: Path) -> Path:
    """Copy a run from another machine; the local path, verified."""
    name = PurePosixPath(source.path).name
    if name in ("", ".", ".."):
        raise ConfigError(f"{source} names no run; write HOST:PATH/TO/RUN.")
    destination = folder / name
    if _ssh(source.host, f"test -f {shlex.quote(source.path)}/run.json").returncode:
        raise RunError(f"{source} is not a run: there is no run.json, or no way to {source.host}.")
    _require_rsync(source.host)
    destination.mkdir(parents=True, exist_ok=True)
    _copy(f"{source}/", f"{destination}/")
    try:
        count = _verify_checkpoints(destination)
    except CheckpointError as error:
        warn(f"what differs from its manifest is copied again: {error}")
        _copy(f"{source}/", f"{destination}/", "--checksum")
        count = _verify_checkpoints(destination)
    say(f"{count} checkpoints verified in {destination}")
    return destination


def push(run: Path, target: Remote) -> Remote:
    """Copy a run to a folder on another machine; where it is there, verified."""
    RunDir(run).require()
    destination = Remote(target.host, f"{target.path}/{run.resolve().name}")
    made = _ssh(target.host, f"mkdir -p {shlex.quote(destination.path)}")
    if made.returncode:
        said = " ".join(made.stderr.split()) or f"code {made.returncode}"
        raise RunError(f"{destination} cannot be made: {said}.")
    _require_rsync(target.host)
    _copy(f"{run}/", f"{destination}/")
    try:
        count = _verify_checkpoints(run)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} It is damaged here already, and so is its copy; the rest is copied: see"
            f" `foundling runs verify {run} --all`."
        ) from None
    if (run / "checkpoints").is_dir():
        sides = (f"{run}/checkpoints/", f"{destination}/checkpoints/")
        wrong = _differing(*sides)
        if wrong:
            _copy(*sides, "--checksum")
            wrong = _differing(*sides)
        if wrong:
            raise CheckpointError(
                f"{destination}/checkpoints/{wrong[0]} differs from its source after the copy; copy"
                " it again, and look at that machine's disk if it stays so."
            )
    say(f"{count} checkpoints verified on {target.host}")
    return destination


def _verify_checkpoints(run: Path) -> int:
    """Compare every checkpoint with its manifest; how many there are."""
    from foundling.checkpoint.folders import list_checkpoints
    from foundling.checkpoint.manifest import verify

    folders = list_checkpoints(run / "checkpoints")
    for path in folders:
        try:
            verify(path)
        except CheckpointError:
            if path.exists():  # a live run may have retired it
                raise
    return len(folders)


def _require_rsync(host: str) -> None:
    """Refuse to copy where one of the two machines has no rsync."""
    here = shutil.which("rsync")
    if not here or _ssh(host, "command -v rsync").returncode:
        where = host if here else "this machine"
        raise RunError(f"rsync is not on the PATH of {where}; install it there to copy runs.")


def _copy(source: str, target: str, *options: str) -> None:
    """Two passes: everything but the manifests of checkpoints, then they."""
    _rsync(source, target, *options, "--exclude=step-*/manifest.json")
    _rsync(source, target, *options)


def _differing(source: str, target: str) -> list[str]:
    """Files whose checksums differ on the two sides; those that only one has are left out, since a
    live run may have saved again."""
    how = ("--checksum", "--existing", "--dry-run", "--itemize-changes")
    listed = _rsync(source, target, *how)
    return [line.split(maxsplit=1)[1] for line in listed if line.startswith("<f")]


def _rsync(source: str, target: str, *options: str) -> list[str]:
    """The lines that rsync prints."""
    words = ["rsync", "--archive", "--partial", "--inplace", "-e", "ssh", *options]
    words += [f"--exclude={pattern}" for pattern in LEFT_OUT]
    done = subprocess.run([*words, source, target], stdout=subprocess.PIPE, text=True)
    # 24: files vanished while we copied: a checkpoint that the run has retired.
    if done.returncode not in (0, 24):
        raise RunError(
            f"rsync from {source} to {target} broke off with code {done.returncode};"
            " the same command goes on from there."
        )
    return done.stdout.splitlines()


def _ssh(host: str, command: str) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(["ssh", host, command], capture_output=True, text=True)
    except FileNotFoundError:
        raise RunError("ssh is not on the PATH; install it to copy runs.") from None


# Throwing a run away without losing it: one rename moves it into .trash in the same folder.
#
# runs/.trash/NAME--20260101-120000/     the run as it was, with trash.json saying where from
#
# Only `runs rm --empty` deletes, by age, and a finished run only when it
# is asked for by that word.

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


def move_to_trash(run: Path) -> Path:
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
        status = "stopped"  # its lock is free: killed or interrupted
    note = {"origin": str(run), "since": now, "status": status}
    write_text_atomic(run / NOTE, json.dumps(note) + "\n")
    os.rename(run, place)
    fsync_dir(run.parent)
    return place


def _own_info(run: RunDir) -> dict[str, Any]:
    """run.json of what is thrown away: a run, a damaged one, or the rest of a start that was cut
    off before run.json. A folder with any other file in it is refused."""
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
    # The trash may have been moved together with the runs: restored means into the trash's folder.
    destination = entry.path.resolve().parent.parent / entry.origin.name
    if destination.exists():
        raise RunError(
            f"{destination} exists again; move it away before {entry.path} can come back."
        )
    os.rename(entry.path, destination)
    (destination / NOTE).unlink(missing_ok=True)
    fsync_dir(destination.parent)
    return destination


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


def parse_age(text: str) -> float:
    """Seconds of 30d, 12h, 2w or 45m."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text)
    if not match:
        raise ConfigError(f"{text} is no age; write 30d, 12h, 2w or 45m.")
    return float(match[1]) * _UNITS[match[2]]
