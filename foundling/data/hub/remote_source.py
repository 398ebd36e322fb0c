"""Sources whose files are remote: the hub, s3 and https by fsspec, the `datasets` library."""

import functools
import hashlib
import io
import re
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, cast
from urllib.parse import unquote, urlsplit

from foundling.config.errors import DataError
from foundling.data.hub.download import (
    RemoteFile,
    Repo,
    ask,
    brief,
    download,
    fetch,
    here,
    hub_headers,
    insist,
    network_errors,
    offline,
    spool,
    spooled,
)
from foundling.data.hub.recipes import HubUri
from foundling.data.hub.splits import Readable
from foundling.data.readers.columns import (
    ColumnMapping,
    check_columns,
    detect_columns,
    parse_filters,
)
from foundling.data.readers.file_formats import TABLES, Form
from foundling.data.readers.files import WHOLE, FilePiece, FileSource, RowRange, cuts, whole_rows
from foundling.data.readers.parquet import Range
from foundling.data.readers.row_builder import RowBuilder, template_fields
from foundling.data.readers.source import Kind, ReadOptions, Row

# Sources whose files are elsewhere: looked into when opened, fetched when their rows are read.
#
# So `--tokens N` fetches no more files than it needs, and any worker on any machine can read any
# piece. A file of the hub is cut into pieces by rows, as its footer says, and fetched whole by the
# first of them; where nothing is kept (`--stream`, other addresses) a file is one piece, because
# each piece would fetch it again.


@dataclass(frozen=True)
class Elsewhere(ABC):
    """A file that can be looked into before it is fetched."""

    name: str
    """Its path in the repository or below the address."""
    local = None
    """It counts as elsewhere even when it is here: pieces must not depend on a cache."""

    @property
    def kept(self) -> bool:
        """Whether `open` keeps the file, so that it may be opened often."""
        return False

    @property
    def absent(self) -> bool:
        """Whether it is neither here nor in reach."""
        return False

    @abstractmethod
    def identity(self) -> str:
        """What changes when its bytes do."""

    @abstractmethod
    def open(self) -> BinaryIO:
        """All of it, from the first byte."""

    @abstractmethod
    def peek(self) -> BinaryIO:
        """The file by its parts, for looking and not for reading rows."""


@dataclass(frozen=True)
class HubFile(Elsewhere):
    """A file of a repository at one commit."""

    repo: Repo
    file: RemoteFile
    remedy: str
    """The command that fetches it, for a machine that cannot."""
    stream: bool = False

    @property
    def kept(self) -> bool:
        """In the hub's cache, unless the build streams."""
        return not self.stream

    @property
    def absent(self) -> bool:
        """Offline and not fetched."""
        return offline() and not here(self.repo, self.file)

    def identity(self) -> str:
        """The hub's checksum, which is compared with the content whenever it is read."""
        return f"{self.file.size} bytes, {self.file.checksum}"

    def open(self) -> BinaryIO:
        """The checked content."""
        if self.stream:
            return spool(self.repo, self.file)
        return open(fetch(self.repo, self.file, remedy=self.remedy), "rb")

    def peek(self) -> BinaryIO:
        """What is here, else parts of it by ranges."""
        found = here(self.repo, self.file)
        if found and not self.stream:
            return open(found[0], "rb")
        if offline():
            return self.open()
        return _ranged(self, self.repo.url(self.name), self.file.size, self.repo.page)


@dataclass(frozen=True)
class _Looked:
    """A file as it looks from outside."""

    file: Elsewhere

    local = None

    @property
    def name(self) -> str:
        return self.file.name

    def identity(self) -> str:
        return self.file.identity()

    def open(self) -> BinaryIO:
        return self.file.peek()


class RemotePiece(FilePiece):
    """Some rows of a file that is fetched when they are read, out of checked content."""

    def rows(self, tally: Counter[str] | None = None) -> Iterator[Row]:
        """As of a file that is here."""
        # The cuts were found by looking from outside, without a checksum: see that they hold.
        if self.part not in (WHOLE, _ALL_ROWS) and self.part not in cuts(self.file, self.form):
            raise DataError(
                f"{self.file.name} is not cut where it seemed to be from outside; start the build"
                " again."
            )
        yield from super().rows(tally)


@dataclass(frozen=True)
class AbsentPiece:
    """A file that cannot be had without network; a build that has enough before it never asks."""

    file: Elsewhere

    @property
    def name(self) -> str:
        """The file's name."""
        return self.file.name

    def identity(self) -> str:
        """That it is absent: its rows are other pieces once it is here."""
        return f"absent: {self.file.name} {self.file.identity()}"

    def rows(self, tally: Counter[str] | None = None) -> Iterator[Row]:
        """The sentence that says what to do."""
        self.file.open().close()
        yield from ()


_ALL_ROWS = Range(0, None, 0)


@dataclass(frozen=True)
class RemoteSource:
    """Text or conversations from files elsewhere, in the order given."""

    name: str
    files: tuple[Elsewhere, ...]
    documents: int | None
    options: ReadOptions

    draws = False
    """Equal rows are the same row twice."""

    @cached_property
    def kind(self) -> Kind:
        """Documents or conversations, by the columns of the first file."""
        return self._settled(self.files[0])[1].kind

    @property
    def recipe(self) -> dict[str, Any]:
        """Checksums, but neither folders nor a commit: a README that changes is no other data."""
        listing = "\n".join(f"{file.name} {file.identity()}" for file in self.files)
        return {
            "source": self.name,
            "files": len(self.files),
            "digest": hashlib.sha256(listing.encode()).hexdigest(),
            "documents": self.documents,
            "read": self.options.changed(),
        }

    def _settled(self, file: Elsewhere) -> tuple[Form, ColumnMapping]:
        """What a file holds, seen from outside."""
        return FileSource(self.name, (_Looked(file),), None, self.options).layouts[0]

    def pieces(self) -> Iterator["RemotePiece | AbsentPiece"]:
        """Parts of files; a file is looked into when its first part is asked for."""
        left = self.documents
        for file in self.files:
            if file.absent:
                yield AbsentPiece(file)
                continue
            form, layout = self._settled(file)
            if layout.kind != self.kind:
                raise DataError(
                    f"{self.name} mixes documents and conversations: {file.name} differs from"
                    f" {self.files[0].name}; read parts of it by path."
                )
            for part in self._parts(file, form):
                if left is not None and left <= 0:
                    return
                piece = RemotePiece(self.name, file, form, layout, self.options, part, left)
                if left is not None:
                    left -= sum(1 for _ in piece.rows())
                yield piece

    def _parts(self, file: Elsewhere, form: Form) -> Iterator[Range | RowRange]:
        if file.kept:
            yield from cuts(_Looked(file), form)
        else:
            yield _ALL_ROWS if form.format in TABLES else WHOLE

    def __iter__(self) -> Iterator[Row]:
        return whole_rows(self.pieces(), self.options)


# Looking into a file that is elsewhere: byte ranges as they are asked for, nothing stored.
#
# For the beginning of a file or the footer of a Parquet file, which say what it holds and where it
# can be cut. Rows are never read this way: a range has no checksum.

_BLOCK = 1 << 20


def _ranged(file: Elsewhere, url: str, size: int | None, page: str) -> BinaryIO:
    """A file by its ranges; all of it where the server knows none or no length."""
    from fsspec.spec import AbstractBufferedFile

    if not size:
        return file.open()
    last: int = size

    class Ranged(AbstractBufferedFile):  # type: ignore[misc]
        @cached_property
        def whole(self) -> BinaryIO:
            return file.open()

        def _fetch_range(self, start: int, stop: int) -> bytes:
            if part := _byte_range(file, url, start, min(stop, last), page):
                return part
            self.whole.seek(start)
            return self.whole.read(stop - start)

        def close(self) -> None:
            if "whole" in vars(self):
                self.whole.close()
            super().close()

    # Aligned blocks: looking again at the same place finds them remembered.
    ranged = Ranged(None, url, size=size, block_size=_BLOCK, cache_type="blockcache")
    return cast(BinaryIO, io.BufferedReader(ranged))


@functools.lru_cache(maxsize=16)
def _byte_range(file: Elsewhere, url: str, start: int, stop: int, page: str) -> bytes:
    """Some bytes; none where the server would send all of them. The last ones are remembered: the
    same places are looked at several times in a row."""
    headers = hub_headers() if isinstance(file, HubFile) else {}

    def attempt() -> bytes:
        with ask(url, {**headers, "Range": f"bytes={start}-{stop - 1}"}) as response:
            return b"" if response.status_code == 200 else bytes(response.read())

    return insist(attempt, file.name, page)


# Files at other addresses: https by the hub's client, everything else through fsspec.
#
# A file is read from a nameless copy, so a connection that breaks off costs a retry and not the
# rest of the file. These addresses promise no checksum: a length is compared, and the server's own
# mark of a version (ETag, or the time of change) is the file's identity.

_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs"}


@dataclass(frozen=True)
class AddressFile(Elsewhere):
    """A file at an address of https, or of a store that fsspec knows."""

    url: str
    size: int | None
    mark: str

    def identity(self) -> str:
        """What the server says of it."""
        return f"{self.url} {self.size} {self.mark}"

    def open(self) -> BinaryIO:
        """From the first byte of a copy."""
        return spooled(self.size, self.name, self._fill)

    def peek(self) -> BinaryIO:
        """Parts of it, where its length is known."""
        if not _is_web(self.url):
            store, path = _store(self.url)
            return cast(BinaryIO, store.open(path, "rb"))
        return _ranged(self, self.url, self.size, self.url)

    def _fill(self, out: BinaryIO) -> None:
        if _is_web(self.url):
            download(self.url, out, self.size, self.name, self.url)
            return

        def attempt() -> None:
            try:
                store, path = _store(self.url)
                with store.open(path, "rb", block_size=8 * _BLOCK) as stream:
                    stream.seek(out.seek(0, 2))
                    shutil.copyfileobj(stream, out, 8 * _BLOCK)
            except Exception as error:  # stores have errors of their own for a bad connection
                if isinstance(error, (DataError, *network_errors())):
                    raise
                raise OSError(brief(error)) from None
            if out.seek(0, 2) != self.size:
                raise OSError(f"{out.tell():,} of {self.size:,} bytes")

        insist(attempt, self.url, self.url, reached=lambda: out.seek(0, 2))


def _is_web(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def remote_files(url: str, readable: Readable) -> Sequence[AddressFile]:
    """The files that an address, a folder of one or a pattern means."""
    if _is_web(url):
        return [_web_file(url, readable)]
    store, path = _store(url)
    try:
        found = _listing(store, path)
    except Exception as error:  # each store has its own for a bad name or missing credentials
        raise DataError(
            f"{url} cannot be listed ({brief(error)}); check the name and your credentials."
        ) from None
    scheme = url.partition("://")[0]
    root = _fixed_part(path)
    files = [
        AddressFile(
            name[len(root) :].lstrip("/"), f"{scheme}://{name}", int(info["size"]), _mark(info)
        )
        for name, info in sorted(found.items())
        if info.get("type") == "file" and readable(name)
    ]
    if not files:
        raise DataError(
            f"{url} holds no file that can be read; give a file, a folder or a pattern."
        )
    return files


def _web_file(url: str, readable: Readable) -> AddressFile:
    path = urlsplit(url).path
    if not readable(path):
        raise DataError(f"{url} does not end like a file that can be read.")

    def attempt() -> Any:
        with ask(url, method="HEAD") as response:
            return response.headers

    headers = insist(attempt, url, url)
    length = headers.get("Content-Length")
    mark = headers.get("ETag") or headers.get("Last-Modified") or ""
    size = int(length) if length else None
    return AddressFile(unquote(path).rpartition("/")[2], url, size, mark.strip('"'))


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


# Data sets that only the datasets library can read: a loading script, or a format we do not know.
#
# Read as its stream, a shard at a time, so nothing of the raw source is stored. The library
# promises no checksum; the commit is the identity. It is an extra, and asked only when no file of
# the repository (or of the hub's own Parquet copy) can be read without it.


@dataclass(frozen=True)
class LibrarySource:
    """What the library streams."""

    name: str
    repo: Repo
    config: str
    split: str
    shards: int
    layout: ColumnMapping
    options: ReadOptions

    @property
    def kind(self) -> Kind:
        """Documents or conversations, by the columns."""
        return self.layout.kind

    draws = False
    """Equal rows are the same row twice."""

    @property
    def recipe(self) -> dict[str, Any]:
        """The commit, because no file of it has a checksum for us."""
        part = {"config": self.config, "split": self.split, "commit": self.repo.commit}
        return {"source": self.name, **part, "read": self.options.changed()}

    def pieces(self) -> Iterator["LibraryPiece"]:
        """The library's shards."""
        for index in range(self.shards):
            yield LibraryPiece(self, index)

    def __iter__(self) -> Iterator[Row]:
        return whole_rows(self.pieces(), self.options)


@dataclass(frozen=True)
class LibraryPiece:
    """One shard of the library's stream."""

    source: LibrarySource
    index: int

    @property
    def name(self) -> str:
        """The shard, of how many."""
        return f"{self.source.repo.name} shard {self.index} of {self.source.shards}"

    def identity(self) -> str:
        """The commit and the part of it."""
        source = self.source
        return f"{self.name} {source.repo.commit} {source.config} {source.split}"

    def rows(self, tally: Counter[str] | None = None) -> Iterator[Row]:
        """The rows as the library gives them."""
        source = self.source
        maker = RowBuilder(
            source=source.name,
            file=f"shard-{self.index}",
            layout=source.layout,
            options=source.options,
            tally=Counter() if tally is None else tally,
        )
        filters = parse_filters(source.options.where)
        for place, value in enumerate(self._values()):
            row = maker.record(value, place, filters)
            if row is not None:
                yield row

    def _values(self) -> Iterator[Any]:
        source = self.source
        stream = _load(source.repo, source.config, source.split)
        if source.shards > 1:
            stream = stream.shard(num_shards=source.shards, index=self.index)
        try:
            yield from stream
        except Exception as error:  # whatever a foreign loader raises
            raise DataError(f"{self.name} broke off ({brief(error)}); try again.") from error


def library_source(
    name: str,
    uri: HubUri,
    repo: Repo,
    options: ReadOptions,
    documents: int | None,
) -> LibrarySource:
    """A source by way of the library, if it is there and knows how."""
    if offline() or documents is not None:
        raise DataError(
            f"{uri} has no file that can be read directly, so it cannot be read offline or limited"
            " by documents; fetch it where there is network, or limit its tokens."
        )
    stream = _load(repo, uri.config, uri.split or "train")
    names = stream.column_names or list(next(iter(stream), {}))
    layout = detect_columns(str(uri), [names], 0, options)
    if layout is None:
        raise DataError(f"{uri} has no rows.")
    check_columns(str(uri), [names], template_fields(options.template), "the template")
    wanted = (one.column for one in parse_filters(options.where))
    check_columns(str(uri), [names], wanted, "a filter")
    shards = int(getattr(stream, "num_shards", 1))
    split = uri.split or "train"
    return LibrarySource(name, repo, uri.config, split, shards, layout, options)


def _load(repo: Repo, config: str, split: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{repo.name} has no file that can be read directly; the datasets library may know how:"
            " `pip install 'foundling[datasets]'`."
        ) from None
    try:
        return datasets.load_dataset(
            repo.name, config or None, split=split, streaming=True, revision=repo.commit
        )
    except Exception as error:  # a loader may raise anything
        raise DataError(
            f"{repo.name} cannot be read, neither directly nor by the datasets library"
            f" ({brief(error)})."
        ) from None
