"""A folder through fsspec (s3://, gs://, memory:// ...) with the few habits of a Path that we need.

Nothing here relies on renaming: stores of objects copy and delete instead, which can be interrupted
half way. Rejected: fsspec for local disks too, which would lose fsync, links as such, and
the atomic rename.
"""

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar, cast

from foundling.config.errors import CheckpointError
from foundling.runtime.files import write_text_atomic

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


class RemotePath:
    """One place in a remote store."""

    def __init__(self, store: "AbstractFileSystem", path: str) -> None:
        self.store = store
        self.path = path.rstrip("/")

    @property
    def name(self) -> str:
        """The last part."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        """The folder that this is in."""
        return RemotePath(self.store, self.path.rpartition("/")[0])

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(self.store, f"{self.path}/{name}")

    def with_name(self, name: str) -> "RemotePath":
        """Another name in the same folder."""
        return self.parent / name

    def __str__(self) -> str:
        return str(self.store.unstrip_protocol(self.path))

    def __repr__(self) -> str:
        return f"RemotePath({self})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def is_dir(self) -> bool:
        """Whether there is anything below this name; stores of objects have no empty folders."""
        self.store.invalidate_cache()
        return bool(self.store.isdir(self.path))

    def exists(self) -> bool:
        """Whether this is a file or a folder."""
        self.store.invalidate_cache()
        return bool(self.store.exists(self.path))

    def iterdir(self) -> Iterator["RemotePath"]:
        """What is in this folder."""
        return (self / name for name in self.entries())

    def entries(self) -> dict[str, dict[str, Any]]:
        """What is in this folder, by name, as the store describes it."""
        self.store.invalidate_cache()  # it may be older than what another process wrote
        try:
            found = self.store.ls(self.path, detail=True)
        except FileNotFoundError:
            return {}
        named = {str(info["name"]).rstrip("/").rpartition("/")[2]: info for info in found}
        # Some stores list a folder's own marker object inside it.
        return {name: info for name, info in named.items() if name and name != self.name}

    def open(self, mode: str) -> BinaryIO:
        """Open a file of the store."""
        return cast(BinaryIO, self.store.open(self.path, mode))

    def read_bytes(self) -> bytes:
        """The whole content."""
        return cast(bytes, self.store.cat_file(self.path))

    def write_bytes(self, content: bytes) -> None:
        """Put a small file there, in one piece."""
        self.store.pipe_file(self.path, content)

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove a file."""
        try:
            self.store.rm_file(self.path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_all(self) -> None:
        """Remove a folder and everything in it."""
        if self.exists():
            self.store.rm(self.path, recursive=True)


Folder = Path | RemotePath
F = TypeVar("F", Path, RemotePath, Path | RemotePath)


class FolderEntry(NamedTuple):
    """What a folder says about one of its entries."""

    kind: str
    """file, directory, or anything else, which is refused."""
    size: int
    mark: tuple[Any, ...]
    """Changes when the file does: times and inode, or what the store calls its version."""


def open_folder(place: str | Path) -> Folder:
    """The folder that a path or an address means; file:// is a local path."""
    text = str(place)
    if "://" not in text:
        return Path(place)
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    import fsspec  # torch brings it along, but only remote folders need it

    scheme = text.partition("://")[0]
    try:
        store, path = fsspec.core.url_to_fs(text)
    except ImportError:
        raise CheckpointError(
            f"{text} needs a package for {scheme}:// that is not installed; install it with"
            " `pip install 'foundling[remote]'`."
        ) from None
    except ValueError:
        raise CheckpointError(
            f"{text} has a scheme that is not known; use a folder, s3://, gs:// or another that"
            " fsspec knows."
        ) from None
    return RemotePath(store, str(path))


def write_text(path: Folder, text: str) -> None:
    """Put a small file there, whole or not at all."""
    if isinstance(path, RemotePath):
        path.write_bytes(text.encode())
    else:
        write_text_atomic(path, text)


def describe(folder: Folder) -> dict[str, FolderEntry]:
    """Everything in a folder by name, links not followed."""
    if isinstance(folder, RemotePath):
        return {name: _remote_entry(info) for name, info in folder.entries().items()}
    return {path.name: look(path) for path in folder.iterdir()}


def look(path: Folder) -> FolderEntry:
    """One entry, a link not followed; FileNotFoundError if there is none."""
    if isinstance(path, RemotePath):
        path.store.invalidate_cache()
        return _remote_entry(path.store.info(path.path))
    status = path.lstat()
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory"}
    # ctime is in it because mtime can be set by anyone, and copying tools do.
    mark = (status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    return FolderEntry(kinds.get(stat.S_IFMT(status.st_mode), "other"), status.st_size, mark)


def _remote_entry(info: dict[str, Any]) -> FolderEntry:
    kind = "other" if info.get("islink") else str(info["type"])
    return FolderEntry(kind, int(info.get("size") or 0), _version(info))


def _version(info: dict[str, Any]) -> tuple[Any, ...]:
    names = ("ETag", "etag", "md5Hash", "generation", "LastModified", "mtime", "created")
    return tuple(str(info[name]) for name in names if name in info)
