"""Files as they lie on disk: what their names say, how they are opened, what damage looks like."""

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa

from foundling.config.errors import DataError
from foundling.data.sources.base import File
from foundling.runtime.files import sha256_file

FORMATS = {
    ".txt": "txt",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
TABLES = ("parquet", "arrow")
COMPRESSIONS = {
    ".gz": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".xz": "xz",
    ".bz2": "bz2",
}
BUFFER = 1 << 20


class Broken(Exception):  # noqa: N818 - said of a file, as OSError is of a disk
    """A file whose contents make no sense from here on."""

    def __init__(self, reason: str, *, lost: int = 0, read: int = 0, left: int = 0) -> None:
        super().__init__(reason)
        self.lost = lost
        """Rows known to be lost."""
        self.read, self.left = read, left
        """Bytes of the file before and after the place where reading ended."""

    def lost_rows(self, rows: int) -> int:
        """About how many rows are lost, where so many were read from the bytes before."""
        return self.lost + (round(rows * self.left / self.read) if self.read else 0)


DAMAGE = (Broken, OSError, EOFError, zlib.error, lzma.LZMAError, pa.ArrowException)
"""What reading a damaged file raises, depending on its format."""


@dataclass(frozen=True)
class Form:
    """A format and the compression around it."""

    format: str
    compression: str = ""


def form_of(name: str) -> Form | None:
    """What the suffixes of a name say; None if they say nothing that can be read."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes[-2:]]
    compression = COMPRESSIONS.get(suffixes[-1], "") if suffixes else ""
    if compression:
        suffixes.pop()
    format = FORMATS.get(suffixes[-1]) if suffixes else None
    if format is None:
        return None
    if compression and format in TABLES:
        raise DataError(
            f"{name} is a table inside {compression}, which cannot be read in pieces; unpack it."
        )
    return Form(format, compression)


@dataclass(frozen=True)
class LocalFile:
    """A file on this machine."""

    name: str
    path: str

    @property
    def local(self) -> str:
        """It lies here."""
        return self.path

    def open(self) -> BinaryIO:
        """From the first byte."""
        try:
            return open(self.path, "rb", buffering=BUFFER)
        except OSError as error:
            raise DataError(f"{self.path} cannot be opened ({error.strerror}).") from None

    def identity(self) -> str:
        """Its size and checksum."""
        try:
            stat = Path(self.path).stat()
            return _identity(self.path, stat.st_size, stat.st_mtime_ns)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read ({error.strerror}).") from None


@lru_cache(maxsize=1 << 16)
def _identity(path: str, size: int, changed: int) -> str:
    """Many pieces share a file: it is hashed once a process unless it changes."""
    return f"{size} bytes, sha256 {sha256_file(Path(path))}"


_UNPACK: Mapping[str, Callable[[BinaryIO], Any]] = {
    "gzip": lambda raw: gzip.GzipFile(fileobj=raw),
    "xz": lzma.LZMAFile,
    "bz2": bz2.BZ2File,
    # Arrow's reader notices a cut file; the usual package for zstd takes it for a short one.
    "zstd": lambda raw: pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd"),
}


@contextmanager
def opened(file: File, form: Form) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked; reading them may raise any of DAMAGE."""
    with file.open() as raw, contextlib.ExitStack() as closing:
        stream = raw
        if form.compression:
            stream = closing.enter_context(_unpacked(raw, form.compression))
        try:
            yield stream
        except DAMAGE as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise broken(error, raw) from None


def broken(error: Exception, raw: Any) -> Broken:
    """The same damage, with how much of the file comes after it."""
    read = left = 0
    with contextlib.suppress(OSError, ValueError, pa.ArrowException):  # no place, or closed
        read = raw.tell()
        left = raw.seek(0, 2) - read
    return Broken(reason_of(error), lost=getattr(error, "lost", 0), read=read, left=left)


def _unpacked(raw: BinaryIO, compression: str) -> BinaryIO:
    return cast(BinaryIO, io.BufferedReader(_UNPACK[compression](raw), BUFFER))


def reason_of(error: Exception) -> str:
    """One line about damage."""
    lines = str(error).splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]


def raise_if_passing(error: Exception, file: str) -> None:
    """Refuse to take the machine's trouble for the file's.

    An error with a number comes from the system (a disk, a network mount, a limit): the same file
    may be read well another time, so rows after it must not be given up for good.
    """
    if isinstance(error, OSError) and error.errno is not None:
        raise DataError(
            f"{file} could not be read to its end ({error.strerror}); see to it and start again."
        ) from None
