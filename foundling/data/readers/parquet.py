"""Parquet and Arrow files: batches of a few megabytes, of the columns that are needed, and no more.

Rows are made from whole columns where that means the same (a column of text, a filter on numbers).
Batches are validated before a value is touched: a flipped byte in an Arrow file's offsets would
otherwise read memory that is not the file's. A batch that is not valid is taken row by row, so that
one bad row costs itself alone.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from foundling.config.errors import DataError
from foundling.data.readers.columns import Filter, columns_to_read
from foundling.data.readers.file_formats import (
    BUFFER,
    DAMAGE,
    Broken,
    broken,
    raise_if_passing,
    reason_of,
)
from foundling.data.readers.row_builder import NOT_UTF8, Bad, RowBuilder
from foundling.data.readers.source import FILTERED, File, Row

BATCH_BYTES = 4 << 20
BATCH_ROWS = 4096


@dataclass(frozen=True)
class Range:
    """Groups of rows `start` to `stop` (None: to the end), of which the first row has a number."""

    start: int
    stop: int | None
    first_row: int


def schema_of(file: File, format: str) -> Any:
    """The columns of a table, or one sentence about why it has none that can be read."""
    try:
        with _parquet(file) if format == "parquet" else _arrow(file) as table:
            schema = table.schema_arrow if format == "parquet" else table.schema
        _ = schema.names  # decodes them, which fails if they are damaged
        return schema
    except (*DAMAGE, UnicodeDecodeError) as error:
        raise_if_passing(error, file.name)
        name = "Parquet" if format == "parquet" else "Arrow"
        with file.open() as stream:
            is_cut = stream.read(4) == b"PAR1" and stream.seek(-4, 2) and stream.read() != b"PAR1"
        reason = "it is truncated: its end is missing" if is_cut else reason_of(error)
        raise DataError(
            f"{file.name} cannot be read as {name} ({reason}); fetch it again."
        ) from None


def check_text_column(file: str, schema: Any, column: str) -> None:
    """Refuse a column that cannot hold text: every row of it would be bad."""
    index = schema.get_field_index(column)
    if index < 0:
        return
    kind = schema.field(index).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    others = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
    if not any(test(kind) for test in (*texts, *others, pa.types.is_null)):
        raise DataError(
            f"the column `{column}` of {file} holds {kind} and no text; name another with --text."
        )


def ranges(file: File, format: str, least_bytes: int, most: int) -> Iterator[Range]:
    """Cut a table into some `most` ranges of at least `least_bytes`; the last has no end.

    Damage is not looked for here: the reader of the range finds it.
    """
    if format == "arrow" and file.local is None:  # it would have to be read to be cut
        yield Range(0, None, 0)
        return
    start = first = rows = size = 0
    for number, (group_rows, group_bytes, total) in enumerate(_groups(file, format)):
        if rows and size >= max(least_bytes, total / most):
            yield Range(start, number, first)
            start, first, rows, size = number, first + rows, 0, 0
        rows += group_rows
        size += group_bytes
    yield Range(start, None, first)


def _groups(file: File, format: str) -> Iterator[tuple[int, int, int]]:
    """Rows and bytes of each group of rows, and the bytes of all of them."""
    try:
        if format == "parquet":
            with _parquet(file) as table:
                meta = table.metadata
                groups = [meta.row_group(number) for number in range(meta.num_row_groups)]
            total = sum(group.total_byte_size for group in groups)
            yield from ((group.num_rows, group.total_byte_size, total) for group in groups)
            return
        total = os.path.getsize(file.local or "")
        with _arrow(file) as reader:
            for batch, size in _slices(reader):
                yield batch.num_rows, size, total
    except DAMAGE as error:
        raise_if_passing(error, file.name)


@contextmanager
def _parquet(file: File) -> Iterator[Any]:
    # Buffered and never mapped: a row group may be larger than what a build may hold.
    with (
        file.open() as stream,
        pq.ParquetFile(
            stream, buffer_size=BUFFER, pre_buffer=False, page_checksum_verification=True
        ) as table,
    ):
        yield table


@contextmanager
def _arrow(file: File) -> Iterator[Any]:
    """A reader of the file format or of the stream format; the first bytes tell."""
    path = file.local
    with file.open() as stream:
        is_file = stream.read(6) == b"ARROW1"
        stream.seek(0)
        read = pa.ipc.open_file if is_file else pa.ipc.open_stream
        with (
            pa.memory_map(path) if path is not None else pa.PythonFile(stream, "r") as source,
            read(source) as reader,
        ):
            try:
                yield reader
            except pa.ArrowException as error:
                if is_file or isinstance(error, OSError):
                    raise
                raise broken(error, source) from None


def _slices(reader: Any) -> Iterator[tuple[Any, int]]:
    """The batches of an Arrow file, large ones in parts, each with its size in bytes.

    A batch is mapped and not read, and what a piece has touched is let go when it ends: so a file
    that is one single batch is cut as well as any other.
    """
    count = getattr(reader, "num_record_batches", None)
    for batch in reader if count is None else _batches(reader, count):
        size = _rows_at_once(batch.num_rows, batch.nbytes)
        for start in range(0, batch.num_rows, size):
            part = batch.slice(start, size)
            yield part, batch.nbytes * part.num_rows // batch.num_rows


def _batches(reader: Any, count: int) -> Iterator[Any]:
    """The batches of a file that says how many it has."""
    rows = 0
    for number in range(count):
        try:
            batch = reader.get_batch(number)
        except pa.ArrowException as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            lost = round(rows * (count - number) / number) if number else 0
            raise Broken(reason_of(error), lost=lost) from None
        rows += batch.num_rows
        yield batch


def read_table(
    file: File, format: str, part: Range, filters: tuple[Filter, ...], maker: RowBuilder
) -> Iterator[Row]:
    """Rows of a range; damage in the file raises one of DAMAGE."""
    first = part.first_row
    is_parquet = format == "parquet"
    with _parquet(file) if is_parquet else _arrow(file) as table:
        names = (table.schema_arrow if is_parquet else table.schema).names
        columns = columns_to_read(names, maker.layout, maker.fields, filters)
        batches = _parquet_batches if is_parquet else _arrow_batches
        for batch in batches(table, part, columns):
            yield from _rows(batch, first, filters, maker)
            first += batch.num_rows


def _parquet_batches(table: Any, part: Range, columns: list[str]) -> Iterator[Any]:
    meta = table.metadata
    numbers = range(part.start, meta.num_row_groups if part.stop is None else part.stop)
    groups = [meta.row_group(number) for number in numbers]
    left = sum(group.num_rows for group in groups)
    try:
        for number, group in zip(numbers, groups, strict=True):
            size = _rows_at_once(group.num_rows, group.total_byte_size)
            for batch in table.iter_batches(size, [number], columns=columns, use_threads=False):
                yield batch
                left -= batch.num_rows
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the machine, which the reader of the piece names
        raise Broken(reason_of(error), lost=left) from None


def _arrow_batches(table: Any, part: Range, columns: list[str]) -> Iterator[Any]:
    for batch, _ in islice(_slices(table), part.start, part.stop):
        yield batch.select(columns)


def _rows_at_once(rows: int, size: int) -> int:
    """As many rows as a few megabytes hold, if all were of one size."""
    return max(1, min(BATCH_ROWS, BATCH_BYTES * rows // max(size, 1)))


def _rows(batch: Any, first: int, filters: tuple[Filter, ...], maker: RowBuilder) -> Iterator[Row]:
    try:
        batch.validate(full=True)
        places, passed = _filtered(batch, first, filters)
        column = maker.layout.columns[0] if maker.layout.columns else None
        if maker.layout.kind == "text" and column in batch.schema.names:
            values = passed.column(column).to_pylist()
        else:
            values, column = passed.to_pylist(), None
    except (ValueError, OverflowError, pa.ArrowException):
        # Undecodable, damaged, or a date that Python does not know: which row it is must be found.
        for place, value in enumerate(_one_by_one(batch), first):
            row = maker.record(value, place, filters)
            if row is not None:
                yield row
        return
    if len(values) < batch.num_rows:
        maker.tally[FILTERED] += batch.num_rows - len(values)
    make = maker.record if column is None else maker.text
    yield from (row for row in map(make, values, places) if row is not None)


def _filtered(batch: Any, first: int, filters: tuple[Filter, ...]) -> tuple[list[int] | range, Any]:
    """The rows that pass, and their places."""
    places = range(first, first + batch.num_rows)
    if not filters:
        return places, batch
    kept = np.ones(batch.num_rows, np.bool_)
    for filter in filters:
        whole = filter.column in batch.schema.names
        name = filter.column if whole else filter.column.split(".")[0]
        rows = batch.select([name]).to_pylist()
        kept &= np.fromiter(map(filter.accepts, rows), np.bool_, len(rows))
    return (np.flatnonzero(kept) + first).tolist(), batch.filter(pa.array(kept))


def _one_by_one(batch: Any) -> Iterator[object]:
    """Rows of a batch of which at least one cannot be read, each by itself."""
    sound = _is_sound(batch)
    for number in range(batch.num_rows):
        row = batch.slice(number, 1)
        try:
            if not sound:
                row.validate(full=True)
            yield row.to_pylist()[0]
        except UnicodeDecodeError:
            yield Bad(NOT_UTF8)
        except (ValueError, OverflowError, pa.ArrowException) as error:
            yield Bad(f"cannot be read ({reason_of(error)})")


def _is_sound(batch: Any) -> bool:
    """Whether every offset stays inside its data, whatever bytes the texts are made of."""
    try:
        batch.validate()
        for column in batch.columns:
            column.cast(_as_bytes(column.type)).validate(full=True)
    except (ValueError, pa.ArrowException):
        return False
    return True


def _as_bytes(kind: Any) -> Any:
    """The same type with bytes in place of text, which no validation can fail to decode."""
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_as_bytes(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_as_bytes(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_bytes(field.type)) for field in kind])
    return kind
