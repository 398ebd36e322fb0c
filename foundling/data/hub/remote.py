"""Files at other addresses: https by the same careful download, everything else through fsspec.

A file is read from a nameless copy, so a connection that breaks off costs a retry and not the rest
of the file. These addresses promise no checksum: a length is compared, and the server's own mark of
a version (ETag, or the time of change) is the file's identity.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any, BinaryIO, cast
from urllib.parse import unquote, urlsplit

from foundling.config.errors import DataError
from foundling.data.hub.layout import Readable
from foundling.data.hub.ranges import ranged
from foundling.data.hub.spooled import BUFFER, spooled
from foundling.data.hub.transfer import Interrupted, Patience, ask, check, download, insist, write

_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs"}


@dataclass(frozen=True)
class UrlFile:
    """A file at an address of http or https."""

    url: str
    size: int | None
    mark: str
    patience: Patience = field(default_factory=Patience)

    @property
    def name(self) -> str:
        """The last part of the address."""
        return unquote(urlsplit(self.url).path).rpartition("/")[2]

    @property
    def local(self) -> None:
        """Elsewhere."""

    @property
    def kept(self) -> bool:
        """No: there is no promise that it stays the same."""
        return False

    @property
    def absent(self) -> bool:
        """In reach as far as is known."""
        return False

    def identity(self) -> str:
        """What the server says of it."""
        return f"{self.url} {self.size} {self.mark}"

    def open(self) -> BinaryIO:
        """From the first byte of a copy."""

        def fill(out: IO[bytes]) -> None:
            download(
                self.url,
                out,
                size=self.size,
                what=self.name,
                page=self.url,
                patience=self.patience,
            )

        return spooled(self.identity(), self.size, self.name, fill)

    def peek(self) -> BinaryIO:
        """Parts of it by ranges, where its length is known."""
        if self.size is None:
            return self.open()
        return ranged(
            self.url,
            self.size,
            headers=dict,
            what=self.name,
            page=self.url,
            patience=self.patience,
            whole=self.open,
        )


@dataclass(frozen=True)
class FsFile:
    """A file of any store that fsspec knows."""

    url: str
    size: int
    mark: str
    name: str
    patience: Patience = field(default_factory=Patience)

    @property
    def local(self) -> None:
        """Elsewhere."""

    @property
    def kept(self) -> bool:
        """No: there is no promise that it stays the same."""
        return False

    @property
    def absent(self) -> bool:
        """In reach as far as is known."""
        return False

    def identity(self) -> str:
        """What the store says of it."""
        return f"{self.url} {self.size} {self.mark}"

    def open(self) -> BinaryIO:
        """From the first byte of a copy."""
        return spooled(self.identity(), self.size, self.url, self._fill)

    def peek(self) -> BinaryIO:
        """The store's own file, which reads what is asked for."""
        store, path = _store(self.url)
        return cast(BinaryIO, store.open(path, "rb"))

    def _fill(self, out: IO[bytes]) -> None:
        def attempt() -> None:
            try:
                copy()
            except (OSError, DataError):
                raise
            except Exception as error:  # stores have errors of their own for a bad connection
                raise Interrupted(_brief(error)) from None

        def copy() -> None:
            store, path = _store(self.url)
            have = out.seek(0, 2)
            with store.open(path, "rb", block_size=BUFFER * 8) as stream:
                stream.seek(have)
                while block := stream.read(BUFFER * 8):
                    write(out, block)
            if out.seek(0, 2) != self.size:
                raise Interrupted(f"{out.tell():,} of {self.size:,} bytes")

        best = 0

        def gained() -> bool:
            nonlocal best
            before, best = best, max(best, out.seek(0, 2))
            return best > before

        insist(attempt, what=self.url, page=self.url, patience=self.patience, gained=gained)


def remote_files(url: str, readable: Readable) -> Sequence[UrlFile | FsFile]:
    """The files that an address, a folder of one or a pattern means."""
    if re.match(r"https?://", url):
        return [_url_file(url, readable)]
    store, path = _store(url)
    try:
        found = _listing(store, path)
    except Exception as error:  # each store has its own for a bad name or missing credentials
        raise DataError(
            f"{url} cannot be listed ({_brief(error)}); check the name and your credentials."
        ) from None
    scheme = url.partition("://")[0]
    root = _fixed_part(path)
    files = [
        FsFile(f"{scheme}://{name}", int(info["size"]), _mark(info), name[len(root) :].lstrip("/"))
        for name, info in sorted(found.items())
        if info.get("type") == "file" and readable(name)
    ]
    if not files:
        raise DataError(
            f"{url} holds no file that can be read; give a file, a folder or a pattern."
        )
    return files


def _url_file(url: str, readable: Readable) -> UrlFile:
    if not readable(urlsplit(url).path):
        raise DataError(f"{url} does not end like a file that can be read.")

    def look() -> Any:
        with ask(url, {}, "HEAD") as answer:
            check(answer)
            return answer.headers

    headers = insist(look, what=url, page=url, patience=Patience())
    length = headers.get("Content-Length")
    mark = headers.get("ETag") or headers.get("Last-Modified") or ""
    return UrlFile(url, int(length) if length else None, mark.strip('"'))


def _store(url: str) -> tuple[Any, str]:
    """The file system of an address and the path on it."""
    import fsspec

    scheme = url.partition("://")[0]
    try:
        store, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        package = _PACKAGES.get(scheme, "")
        remedy = f"install it with `pip install 'foundling[remote]'` ({package or scheme})"
        known = isinstance(error, ImportError) or package
        raise DataError(
            f"{url} needs a package for {scheme}:// that is not installed; {remedy}."
            if known
            else f"{url} has a scheme that is not known; use hf://, https://, s3:// or gs://."
        ) from None
    return store, str(path)


def _listing(store: Any, path: str) -> dict[str, dict[str, Any]]:
    if re.search(r"[*?\[]", path):
        return dict(store.glob(path, detail=True))
    info = store.info(path)
    if info.get("type") == "file":
        return {info["name"]: info}
    return dict(store.find(path, detail=True))


def _fixed_part(path: str) -> str:
    """The folders of a path before its first wildcard, or before its file."""
    folder = re.split(r"[*?\[]", path)[0]
    return folder.rpartition("/")[0] if folder != path or "." in path.rpartition("/")[2] else path


def _mark(info: dict[str, Any]) -> str:
    """What tells this version from another: a checksum of the store's, else a time."""
    for key in ("ETag", "etag", "md5Hash", "crc32c", "sha256", "LastModified", "mtime", "created"):
        if info.get(key):
            return str(info[key]).strip('"')
    return ""


def _brief(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]
