"""Files that are whole or absent: atomic writes, checksums, failpoints for tests."""

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from foundling.config.errors import ConfigError

# Files that are whole or not there: atomic writes, checksums, and directory entries on disk.

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""How a disk says that nothing more can be written to it; trying again does not help."""


@contextlib.contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Where a write to a full disk fails, which names no file, the error names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM and error.filename is None:
            error.filename = str(path)
        raise


def full_disk_told(error: OSError, where: object = None) -> str:
    """The sentence for a disk that takes no more."""
    where = where or error.filename
    told = f"{where}: {error.strerror}" if where else error.strerror
    return f"{told}; make room there, or make it writable, and start the same command again"


def write_text_atomic(path: Path, text: str, *, durable: bool = True) -> None:
    """Write `text` so that a reader, or a kill, sees the old file or the new one and no mixture.

    What can be made again, and is known when it is torn, need not be `durable`: only a power cut
    tells the difference, and waiting for the disk takes longer than writing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        fsync_dir(path.parent)


def cache_folder(name: str) -> Path:
    """Where things are kept that can be made again: in $FOUNDLING_HOME, or ~/.cache/foundling."""
    home = os.environ.get("FOUNDLING_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "foundling") / name


def sha256_file(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse_file(folder: Path) -> None:
    """Say so if what is to become a folder, or a folder above it, is a file."""
    for path in (folder, *folder.parents):
        if path.exists():
            if not path.is_dir():
                raise ConfigError(f"{path} is a file and no folder; give another folder to write.")
            return


def refuse_existing(path: Path) -> None:
    """A file that somebody named is not written over unless they say so."""
    if path.exists():
        raise ConfigError(f"{path} exists; give another name, or --force to overwrite it.")


def fsync_dir(path: Path) -> None:
    """Make renames inside `path` survive a power cut: the entry is data of the directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_folder(temporary: Path, final: Path) -> None:
    """Give a finished folder its name; `final` must not exist, so nothing is ever overwritten."""
    os.rename(temporary, final)
    fsync_dir(final.parent)


# Places where a test may stop the world: `at("rename")` does nothing, and a test replaces it.
#
# A kill at a chosen instant cannot be arranged from outside, and a switch in what ships (an
# environment variable, a setting) could be thrown by accident. So the code only says where it is,
# and tests/chaos puts its own function here (`points.at = ...`), in child processes too. Callers
# write `points.at(...)` and never import the function by itself.
#
# stage     a tensor is about to be copied to the host write     bytes are about to go to a file
# fsync     a file or folder is about to be forced to the disk rename    a finished folder is about
# to get its name delete    a checkpoint is about to lose its name, its marker, its files (three
# times) evaluate  an evaluation is about to begin


def at(point: str) -> None:
    """Nothing, unless a test put something here."""
