"""Files that are whole or not there: atomic writes, checksums, and directory entries on disk."""

import hashlib
import os
from pathlib import Path

from foundling.config.errors import ConfigError


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
