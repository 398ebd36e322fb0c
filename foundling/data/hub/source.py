"""Sources whose files are elsewhere: looked into when opened, fetched when their rows are read.

So `--tokens N` fetches no more files than it needs, and any worker on any machine can read any
piece. A file of the hub is cut into pieces by rows, as its footer says, and fetched whole by the
first of them; where nothing is kept (`--stream`, other addresses) a file is one piece, because each
piece would fetch it again.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, BinaryIO, Protocol

from foundling.config.errors import DataError
from foundling.data.hub.client import Hub, RemoteFile, Repo
from foundling.data.hub.fetch import fetch, here, spool
from foundling.data.hub.ranges import ranged
from foundling.data.rows import Row
from foundling.data.sources.base import File, Kind
from foundling.data.sources.cutting import WHOLE, Span, cuts
from foundling.data.sources.files import FilePiece, FileSource, whole_rows
from foundling.data.sources.layout import Layout
from foundling.data.sources.opening import TABLES, Form
from foundling.data.sources.options import ReadOptions
from foundling.data.sources.tables import Range


class Elsewhere(File, Protocol):
    """A file that can be looked into before it is fetched."""

    @property
    def kept(self) -> bool:
        """Whether `open` keeps the file, so that it may be opened often."""
        ...

    @property
    def absent(self) -> bool:
        """Whether it is neither here nor in reach."""
        ...

    def peek(self) -> BinaryIO:
        """The file by its parts, for looking and not for reading rows."""
        ...


@dataclass(frozen=True)
class HubFile:
    """A file of a repository at one commit."""

    hub: Hub
    repo: Repo
    file: RemoteFile
    remedy: str
    """The command that fetches it, for a machine that cannot."""
    stream: bool = False

    @property
    def name(self) -> str:
        """Its path in the repository."""
        return self.file.path

    @property
    def local(self) -> None:
        """It counts as elsewhere even when it is here: pieces must not depend on a cache."""

    @property
    def kept(self) -> bool:
        """In the hub's cache, unless the build streams."""
        return not self.stream

    @property
    def absent(self) -> bool:
        """Offline and not fetched."""
        return self.hub.offline and not any(here(self.hub, self.repo, self.file))

    def identity(self) -> str:
        """The hub's checksum, which is compared with the content whenever it is read."""
        return f"{self.file.size} bytes, {self.file.checksum}"

    def open(self) -> BinaryIO:
        """The checked content."""
        if self.stream:
            return spool(self.hub, self.repo, self.file)
        return open(fetch(self.hub, self.repo, self.file, remedy=self.remedy), "rb")

    def peek(self) -> BinaryIO:
        """What is here, else parts of it by ranges."""
        found = here(self.hub, self.repo, self.file)
        if found and not self.stream:
            return open(found[0], "rb")
        if self.hub.offline:
            return self.open()
        return ranged(
            self.hub.file_url(self.repo, self.file.path),
            self.file.size,
            headers=self.hub.headers,
            what=f"{self.file.path} of {self.repo.name}",
            page=self.hub.page(self.repo),
            patience=self.hub.patience,
            whole=self.open,
        )


@dataclass(frozen=True)
class _Looked:
    """A file as it looks from outside."""

    file: Elsewhere

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def local(self) -> None:
        return None

    def identity(self) -> str:
        return self.file.identity()

    def open(self) -> BinaryIO:
        return self.file.peek()


@dataclass(frozen=True)
class RemotePiece:
    """Some rows of a file that is fetched when they are read."""

    inner: FilePiece

    @property
    def name(self) -> str:
        """The file's name, and where the part begins."""
        return self.inner.name

    def identity(self) -> str:
        """The file's checksum, the part, and how it is read."""
        return self.inner.identity()

    def rows(self, tally: Counter[str] | None = None) -> Iterator[Row]:
        """The rows, out of checked content."""
        part, file = self.inner.part, self.inner.file
        # The cuts were found by looking from outside, without a checksum: see that they hold.
        if part not in (WHOLE, _ALL_ROWS) and part not in cuts(file, self.inner.form):
            raise DataError(
                f"{file.name} is not cut where it seemed to be from outside; start the build again."
            )
        yield from self.inner.rows(tally)


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

    @property
    def draws(self) -> bool:
        """Equal rows are the same row twice."""
        return False

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

    def _settled(self, file: Elsewhere) -> tuple[Form, Layout]:
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
                inner = FilePiece(self.name, file, form, layout, self.options, part, left)
                if left is not None:
                    left -= sum(1 for _ in inner.rows())
                yield RemotePiece(inner)

    def _parts(self, file: Elsewhere, form: Form) -> Iterator[Range | Span]:
        if file.kept:
            yield from cuts(_Looked(file), form)
        else:
            yield _ALL_ROWS if form.format in TABLES else WHOLE

    def __iter__(self) -> Iterator[Row]:
        return whole_rows(self.pieces(), self.options)


def hub_source(
    name: str,
    spec: str,
    hub: Hub,
    repo: Repo,
    files: tuple[RemoteFile, ...],
    options: ReadOptions,
    documents: int | None = None,
) -> RemoteSource:
    """A source of files of the hub; `spec` is what the user wrote."""
    stream, options = options.stream, replace(options, stream=False)
    ours = tuple(
        HubFile(hub, repo, file, f"foundling data fetch {spec} --shards {number}", stream)
        for number, file in enumerate(files, 1)
    )
    return RemoteSource(name, ours, documents, options)
