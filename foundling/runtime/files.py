"""Files that are whole or absent: atomic writes, checksums, failpoints for tests."""

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from foundling.config.errors import ConfigError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""How a disk says that nothing more can be written to it; trying again does not help."""


BEGINNINGS = {
    b"PAR1": "Parquet", b"ARROW1": "Arrow", b"\xff\xff\xff\xff": "Arrow", b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ\x00": "xz", b"BZh": "bz2", b"%PDF-": "a PDF document",
    b"PK\x03\x04": "a zip archive", b"7z\xbc\xaf": "a 7z archive", b"Rar!\x1a": "a rar archive",
    b"\x89PNG": "an image", b"\xff\xd8\xff": "an image", b"GIF89a": "an image",
    b"\x7fELF": "a program", b"SQLite format 3": "an SQLite database",
    b"version https://git-lfs": "a git LFS pointer", b"<!doctype html": "HTML", b"<html": "HTML",
}  # fmt: skip
"""How files begin that are taken for others, and what they are."""


def contents_of(head: bytes) -> str:
    """What a file is by its first bytes: a format, text, or something else; "" of an empty one."""
    start = head.lstrip().lower()
    for mark, kind in BEGINNINGS.items():
        if head.startswith(mark) or (kind == "HTML" and start.startswith(mark)):
            return kind
    if head[8:10] == b'{"' and head[4:8] == bytes(4):
        return "safetensors (weights of a model)"
    if b"\0" in head:
        return "a binary file"
    return "JSON" if start[:1] in (b"{", b"[") else "text" if head else ""


def contents_at(path: Path) -> str:
    """The same of a file or folder that is there; of a folder "a folder"."""
    if path.is_dir():
        return "a folder"
    with open(path, "rb") as stream:
        return contents_of(stream.read(64))


@contextlib.contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Where a write to a full disk fails, which names no file, the error names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL and error.filename is None:
            error.filename = str(path)
        raise


def full_disk_sentence(error: OSError, where: object = None) -> str:
    """The sentence for a disk that takes no more."""
    where = where or error.filename
    text = f"{where}: {error.strerror}" if where else error.strerror
    return f"{text}; make room there, or make it writable, and start the same command again"


def write_text_atomic(path: Path, text: str, *, durable: bool = True) -> None:
    """Write `text` so that a reader, or a kill, sees the old file or the new one and no mixture.

    What can be made again, and is known when it is torn, need not be `durable`: only a power cut
    shows the difference, and waiting for the disk takes longer than writing.
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
    """Refuse to overwrite a file that the user named, without --force."""
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


# Failpoints: `failpoint("rename")` does nothing, and a test replaces the function.
#
# A kill at a chosen instant cannot be arranged from outside, and a switch in what ships (an
# environment variable, a setting) could be thrown by accident. So the code only says where it is,
# and tests/chaos puts its own function here (`files.failpoint = ...`), in child processes too.
# Callers write `files.failpoint(...)` and never import the function by itself.
#
# stage     a tensor is about to be copied to the host
# write     bytes are about to go to a file
# fsync     a file or folder is about to be forced to the disk
# rename    a finished folder is about to get its name
# delete    a checkpoint is about to lose its name, its marker, its files (three times)
# evaluate  an evaluation is about to begin


def failpoint(point: str) -> None:
    """Nothing, unless a test put something here."""
