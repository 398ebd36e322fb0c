"""Formats, compression and damage of files; paths, folders and patterns as lists of files."""

import bz2
import contextlib
import difflib
import glob
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa

from foundling.config.data_manifest import MANIFEST_NAME
from foundling.config.errors import DataError
from foundling.data.readers.source import File
from foundling.runtime.files import contents_at, contents_of, sha256_file

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


# Which files a path, a folder or a pattern names.

_NOTES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files about the data that other tools write into its folder."""
KNOWN = f"{', '.join(FORMATS)} (also {', '.join(COMPRESSIONS)})"
"""Endings of files, as a sentence names them."""


def local_files(spec: str, names: Sequence[str] = ()) -> tuple[str, tuple[LocalFile, ...]]:
    """The name of what `spec` means and its files, in order of their names; `names` are others that
    it may have been meant for."""
    path = Path(spec)
    if path.is_dir():
        _refuse_built(path)
        root, paths = path, _in_folder(path)
    elif path.is_file():
        root, paths = path.parent, [path] if form_of(path.name) else []
    else:
        root, paths = _matching(spec)
    if not paths:
        raise DataError(_why_none(spec, names))
    name = path.name or path.resolve().name
    files = (LocalFile(path.relative_to(root).as_posix(), os.fspath(path)) for path in paths)
    return name, tuple(files)


def _why_none(spec: str, names: Sequence[str]) -> str:
    """Why a name means no file that can be read."""
    path = Path(spec)
    if path.is_file():
        return f"{spec} {_not_rows(contents_at(path), path.suffix)}"
    if path.is_dir():
        first = next((one for one in sorted(path.rglob("*")) if one.is_file()), None)
        found = f", and {first.name} in it is {contents_at(first) or 'empty'}" if first else ""
        return f"{spec} is a folder without a file that can be read{found}; give {KNOWN}."
    if glob.has_magic(spec):
        return f"no file matches {spec}; give a pattern of {KNOWN}."
    close = difflib.get_close_matches(spec, ("hamlet", "hamlet:chat", *names), n=1)
    hint = f"did you mean {close[0]}?" if close else "give a file, folder or pattern that does,"
    more = "" if close else " hamlet, hamlet:chat, or a data set of a hub."
    return f"{spec} does not exist; {hint}{more}"


def _not_rows(kind: str, suffix: str = "") -> str:
    """What a file is that cannot be read as its name says, and what to do about it."""
    named = {**FORMATS, **COMPRESSIONS, ".txt, .jsonl or .csv": "text"}
    ending = next((one for one, name in named.items() if name == kind.lower()), "")
    if ending in COMPRESSIONS and suffix in FORMATS:
        ending = suffix + ending
    if ending:
        called = f"its name ends in {suffix or 'nothing known'}"
        return f"is {kind} by its first bytes and {called}; rename it to end in {ending}."
    if kind == "a git LFS pointer":
        return f"is {kind} and not the file itself; fetch it with `git lfs pull`."
    if kind == "a zip archive":
        return f"is {kind}; unpack it and give the files in it."
    return f"is {kind or 'empty'} and holds no rows; give text in {KNOWN}."


def check_contents(file: File, form: Form) -> None:
    """Refuse a file on this machine that begins as something else than its name says."""
    if file.local is None:
        return
    with file.open() as stream:
        kind = contents_of(stream.read(64))
    # One bad byte costs its row and a cut table has a sentence of its own, so neither is foreign.
    fitting = {"", "a binary file", form.compression or form.format}
    if not form.compression:
        fitting |= {"text"} if form.format in TABLES else {"text", "json"}
    if form.format == "txt":
        fitting.add("html")
    if kind.lower() not in fitting:
        raise DataError(f"{file.name} {_not_rows(kind, Path(file.name).suffix)}")


def _refuse_built(folder: Path) -> None:
    """A data set of ours holds tokens and no text: its files would be read as something else."""
    try:
        built = "token_dtype" in json.loads((folder / MANIFEST_NAME).read_bytes())
    except (OSError, ValueError, TypeError):
        return
    if built:
        raise DataError(f"{folder} is a data set that is built already; give what it was made of.")


def _in_folder(folder: Path) -> list[Path]:
    """Every file of a known format; hidden ones and notes about the data are no data."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and form_of(path.name))
    return [
        path
        for path in found
        if path.name not in _NOTES
        and not any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
    ]


def _matching(pattern: str) -> tuple[Path, list[Path]]:
    """Files that fit a pattern, and the folder that their names are relative to."""
    if not glob.has_magic(pattern):
        return Path(), []
    paths = sorted(Path(name) for name in glob.glob(pattern, recursive=True))
    paths = [path for path in paths if path.is_file()]
    for path in paths:
        if form_of(path.name) is None:
            raise DataError(
                f"{pattern} matches {path}, which is of no format that can be read; narrow the"
                " pattern."
            )
    parts = Path(pattern).parts
    fixed = next(n for n, part in enumerate(parts) if glob.has_magic(part))
    return Path(*parts[:fixed]), paths
