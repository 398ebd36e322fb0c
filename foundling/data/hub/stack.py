"""The Stack v2: rows that are ids, whose files are fetched from an archive as they are read.

One document a file. A row of the data set is a repository with its files (or one file); a piece is
some hundred rows, because a piece is what an interrupted build does again. Filters look at what the
ids say (language, path, length_bytes, ...) before a file is fetched. What was fetched is kept
beside the ids, a file of ours for each piece, unless the build streams (the ids always are).
"""

import hashlib
import json
import os
import zlib
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from foundling.config.errors import DataError
from foundling.data.hub.download import (
    RemoteFile,
    Repo,
    ask,
    fetch,
    insist,
    network_errors,
    offline,
    status_of,
)
from foundling.data.readers.columns import ColumnMapping, lookup, parse_filters
from foundling.data.readers.files import whole_rows
from foundling.data.readers.row_builder import Bad, RowBuilder
from foundling.data.readers.source import FILTERED, Kind, ReadOptions, Row

PIECE_ROWS = 256
MISSING = "missing"
"""Tally: files that the archive does not have."""
_BATCH_CHARS = 1 << 24
_KEPT = pa.schema([(name, pa.large_string()) for name in ("where", "content", "problem")])
_DOCUMENT = ColumnMapping("text", ("content",))


@dataclass(frozen=True)
class StackSource:
    """Source code by ids."""

    name: str
    spec: str
    repo: Repo
    files: tuple[RemoteFile, ...]
    options: ReadOptions
    stream: bool = False

    @property
    def kind(self) -> Kind:
        """Documents."""
        return "text"

    draws = False
    """Equal files are copies."""

    @property
    def recipe(self) -> dict[str, Any]:
        """The ids' checksums, and what is done with them."""
        listing = "\n".join(file.identity for file in self.files)
        digest = hashlib.sha256(listing.encode()).hexdigest()
        files = {"files": len(self.files), "digest": digest}
        return {"source": self.name, **files, "options": self.options.changed()}

    def pieces(self) -> Iterator["StackPiece"]:
        """Some rows of ids each; a file of ids is fetched when its first piece is asked for."""
        for number in range(len(self.files)):
            rows = self.ids(number).metadata.num_rows
            for first in range(0, rows, PIECE_ROWS):
                yield StackPiece(self, number, first, min(first + PIECE_ROWS, rows))

    def ids(self, number: int) -> Any:
        """A file of ids, open."""
        file = self.files[number]
        remedy = f"foundling fetch {self.spec} --shards {number + 1}"
        try:
            table = pq.ParquetFile(fetch(self.repo, file, remedy=remedy))
        except pa.ArrowException as error:
            reason = str(error).splitlines()[0]
            raise DataError(f"{file.path} cannot be read as Parquet ({reason}).") from None
        if not {"files", "blob_id"} & set(table.schema_arrow.names):
            raise DataError(f"{file.path} holds no ids: neither `files` nor `blob_id` is a column.")
        return table

    def __iter__(self) -> Iterator[Row]:
        return whole_rows(self.pieces(), self.options)


@dataclass(frozen=True)
class StackPiece:
    """Rows `first` to `stop` (not included) of one file of ids."""

    source: StackSource
    number: int
    first: int
    stop: int

    @property
    def name(self) -> str:
        """The file of ids and the rows."""
        return f"{self.source.files[self.number].path} rows {self.first}..{self.stop - 1}"

    def identity(self) -> str:
        """The ids' checksum; a blob's id is its content's."""
        return f"{self.name} {self.source.files[self.number].checksum}"

    def rows(self, tally: Counter[str] | None = None) -> Iterator[Row]:
        """A document a file, in the order of the ids."""
        tally = Counter() if tally is None else tally
        maker = RowBuilder(
            source=self.source.name,
            file=self.source.files[self.number].path,
            layout=_DOCUMENT,
            options=self.source.options,
            tally=tally,
        )
        for where, content in self._contents(tally):
            record = content if isinstance(content, Bad) else {"content": content}
            maker.file, _, place = where.rpartition(":")
            row = maker.record(record, int(place))
            if row is not None:
                yield row

    def _contents(self, tally: Counter[str]) -> Iterator[tuple[str, str | Bad]]:
        source = self.source
        if source.stream:
            yield from self._fetched(tally)
            return
        # Filters are part of what is kept.
        text = json.dumps([source.files[self.number].checksum, list(source.options.where)])
        folder = hashlib.sha256(text.encode()).hexdigest()[:32]
        kept = source.repo.home / "foundling" / "blobs" / folder / f"{self.first:09d}.parquet"
        if not kept.is_file():
            self._keep(kept)
        yield from _read(kept, tally)

    def _fetched(self, tally: Counter[str]) -> Iterator[tuple[str, str | Bad]]:
        """Contents from the archive, in order; what it does not have is counted."""
        blobs = Blobs()
        wanted = self._wanted(tally)
        for (where, _), content in in_order(lambda item: blobs.text(item[1]), wanted, PARALLEL):
            if content is None:
                tally[MISSING] += 1
            else:
                yield where, content

    def _wanted(self, tally: Counter[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """What the ids say of every file that no filter leaves out, with its place."""
        filters = parse_filters(self.source.options.where)
        file = self.source.files[self.number]
        for row, value in _rows(self.source.ids(self.number), self.first, self.stop):
            parts = value.pop("files", None)
            for number, part in enumerate([value] if parts is None else parts):
                whole = part if parts is None else {**value, **part}
                if all(filter.holds(lookup(whole, filter.column)) for filter in filters):
                    yield f"{file.path}:{row}:{number}", whole
                else:
                    tally[FILTERED] += 1

    def _keep(self, kept: Path) -> None:
        """Fetch this piece's files and write them down, whole or not at all."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        source = self.source
        if offline():
            where = "".join(f" --where '{text}'" for text in source.options.where)
            raise DataError(
                f"the files of {self.name} of {source.repo.name} are not here and HF_HUB_OFFLINE is"
                f" set; run `foundling fetch {source.spec}{where}` where there is network,"
                " with this cache."
            )
        tally: Counter[str] = Counter()
        kept.parent.mkdir(parents=True, exist_ok=True)
        temporary = kept.with_name(f"{kept.name}.{os.getpid()}.tmp")
        try:
            # Checksums in every page: damage on this disk is noticed when it is read.
            with pq.ParquetWriter(
                temporary, _KEPT, compression="zstd", write_page_checksum=True
            ) as writer:
                for part in _batches(self._fetched(tally)):
                    writer.write_table(pa.Table.from_pylist(part, schema=_KEPT))
                writer.add_key_value_metadata({"tally": json.dumps(tally)})
            os.replace(temporary, kept)
        finally:
            temporary.unlink(missing_ok=True)


def _batches(contents: Iterable[tuple[str, str | Bad]]) -> Iterator[list[dict[str, str | None]]]:
    """Rows to write down, some megabytes at a time."""
    part: list[dict[str, str | None]] = []
    size = 0
    for where, content in contents:
        bad = content if isinstance(content, Bad) else None
        text = bad.sample if bad else str(content)
        part.append({"where": where, "content": text, "problem": bad.reason if bad else None})
        size += len(text or "")
        if size > _BATCH_CHARS:
            yield part
            part, size = [], 0
    if part:
        yield part


def _read(kept: Path, tally: Counter[str]) -> Iterator[tuple[str, str | Bad]]:
    try:
        table = pq.ParquetFile(kept, page_checksum_verification=True)
        tally.update(json.loads(table.metadata.metadata[b"tally"]))
        for batch in table.iter_batches(batch_size=512):
            for value in batch.to_pylist():
                bad = value["problem"] and Bad(value["problem"], value["content"])
                yield value["where"], bad or value["content"]
    except (pa.ArrowException, OSError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{kept} is damaged ({reason}); remove it and try again.") from None


def _rows(table: Any, first: int, stop: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows first to stop with their numbers, reading only the row groups they are in."""
    number = 0
    for group in range(table.metadata.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if number >= stop or number + rows <= first:
            number += rows
            continue
        for batch in table.iter_batches(batch_size=64, row_groups=[group]):
            low, high = max(first - number, 0), min(stop - number, batch.num_rows)
            if low < high:
                yield from enumerate(batch.slice(low, high - low).to_pylist(), number + low)
            number += batch.num_rows


# Files of Software Heritage's archive by their id: fetched many at a time, unpacked, decoded.
#
# The archive is a public bucket, so plain https does; AWS_ENDPOINT_URL_S3 points elsewhere (a
# mirror, a bucket inside a cloud) as it does for every tool of that cloud.

PUBLIC = "https://softwareheritage.s3.amazonaws.com"
BUCKET = "softwareheritage"
PARALLEL = 32
"""Small files wait for the network and not for us, so many are asked for at once."""
LONGEST = 1 << 26
"""Unpacked bytes of one file; a longer one is no source code."""
_DOUBT = 20
"""So many refusals without one success mean that all is refused, and not that files are missing."""

A = TypeVar("A")
B = TypeVar("B")


def archive_url() -> str:
    """Where blobs are, without the slash and the id."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3", "").rstrip("/")
    return f"{endpoint}/{BUCKET}/content" if endpoint else f"{PUBLIC}/content"


class Blobs:
    """Contents by id; None for one that the archive does not have."""

    def __init__(self) -> None:
        self.url = archive_url()
        self._good = self._refused = 0

    def text(self, file: Mapping[str, Any]) -> str | Bad | None:
        """The decoded content of a row with `blob_id` and `src_encoding`."""
        blob = file.get("blob_id")
        if not isinstance(blob, str) or not blob.isalnum():
            return Bad("no blob id", str(blob)[:40])
        content = self._content(blob)
        if content is None or isinstance(content, Bad):
            return content
        encoding = file.get("src_encoding") or "UTF-8"
        try:
            return content.decode(str(encoding))
        except (UnicodeDecodeError, LookupError):
            return Bad(f"not {str(encoding)[:20]}", content[:100].decode("ascii", "replace"))

    def _content(self, blob: str) -> bytes | Bad | None:
        damaged = False

        def attempt() -> bytes | Bad | None:
            nonlocal damaged
            packed = self._packed(blob)
            try:
                return None if packed is None else unpacked(packed)
            except (zlib.error, EOFError):
                if damaged:  # twice the same: it lies there like that
                    return Bad("damaged in the archive", blob)
                damaged = True
                raise OSError("a damaged body") from None

        return insist(attempt, f"blob {blob}", self.url)

    def _packed(self, blob: str) -> bytes | None:
        try:
            with ask(f"{self.url}/{blob}") as response:
                packed = bytes(response.read())
        except network_errors() as error:
            if status_of(error) not in (403, 404):
                raise
            # 403 is how a bucket that may not be listed says that a file is not there.
            self._refused += status_of(error) == 403
            if self._refused >= _DOUBT and not self._good:
                raise DataError(
                    f"{self.url} refuses every blob (403); ask Software Heritage for access, or set"
                    " AWS_ENDPOINT_URL_S3 to a mirror that has them."
                ) from None
            return None
        self._good += 1
        return packed


def unpacked(packed: bytes) -> bytes | Bad:
    """A gzip file's content, whose own checksum is compared; raises where it is damaged."""
    machine = zlib.decompressobj(31)
    content = machine.decompress(packed, LONGEST)
    if machine.unconsumed_tail:
        return Bad(f"over the limit of {LONGEST} bytes a row")
    if not machine.eof:
        raise EOFError("it ends early")
    return content


def in_order(
    work: Callable[[A], B], items: Iterable[A], workers: int
) -> Generator[tuple[A, B], None, None]:
    """Results in the order of the items, with at most twice `workers` items under way."""
    waiting: deque[tuple[A, Future[B]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                waiting.append((item, pool.submit(work, item)))
                if len(waiting) >= 2 * workers:
                    done, future = waiting.popleft()
                    yield done, future.result()
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
        finally:
            pool.shutdown(cancel_futures=True)
