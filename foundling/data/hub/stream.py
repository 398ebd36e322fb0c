"""Data sets that only the datasets library can read: a loading script, or a format we do not know.

Read as its stream, a shard at a time, so nothing of the raw source is stored. The library promises
no checksum; the commit is the identity. It is an extra, and asked only when no file of the
repository (or of the hub's own Parquet copy) can be read without it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from foundling.config.errors import DataError
from foundling.data.hub.client import Hub, Repo
from foundling.data.hub.layout import Choice
from foundling.data.hub.uri import HubUri
from foundling.data.rows import Row
from foundling.data.sources.base import Kind
from foundling.data.sources.filters import parse_filters
from foundling.data.sources.layout import Layout, check_columns, settle
from foundling.data.sources.making import Maker, template_fields
from foundling.data.sources.options import ReadOptions


@dataclass(frozen=True)
class LibrarySource:
    """What the library streams."""

    name: str
    repo: Repo
    config: str
    split: str
    shards: int
    layout: Layout
    options: ReadOptions

    @property
    def kind(self) -> Kind:
        """Documents or conversations, by the columns."""
        return self.layout.kind

    @property
    def draws(self) -> bool:
        """Equal rows are the same row twice."""
        return False

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
        for piece in self.pieces():
            yield from piece.rows()


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
        maker = Maker(
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
        except Exception as error:  # whatever a loader of somebody else's raises
            raise DataError(f"{self.name} broke off ({_brief(error)}); try again.") from error


def library_source(
    name: str,
    uri: HubUri,
    choice: Choice,
    options: ReadOptions,
    hub: Hub,
    documents: int | None,
) -> LibrarySource:
    """A source by way of the library, if it is there and knows how."""
    if hub.offline or documents is not None:
        raise DataError(
            f"{uri} has no file that can be read directly, so it cannot be read offline or limited"
            " by documents; fetch it where there is network, or limit its tokens."
        )
    stream = _load(choice.repo, uri.config, uri.split or "train")
    names = stream.column_names or list(next(iter(stream), {}))
    options = replace(options, stream=False)
    layout = settle(str(uri), [names], 0, options)
    if layout is None:
        raise DataError(f"{uri} has no rows.")
    check_columns(str(uri), [names], template_fields(options.template), "the template")
    wanted = (one.column for one in parse_filters(options.where))
    check_columns(str(uri), [names], wanted, "a filter")
    shards = int(getattr(stream, "num_shards", 1))
    split = uri.split or "train"
    return LibrarySource(name, choice.repo, uri.config, split, shards, layout, options)


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
            f" ({_brief(error)})."
        ) from None


def _brief(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".")
