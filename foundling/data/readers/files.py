"""A source of files: what they hold is settled when it is opened, and read piece by piece after."""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, BinaryIO, NamedTuple

from foundling.config.errors import ConfigError, DataError
from foundling.data.readers.columns import (
    PLAIN,
    ColumnMapping,
    Filter,
    check_columns,
    check_once,
    columns_to_read,
    detect_columns,
    parse_filters,
)
from foundling.data.readers.file_formats import (
    DAMAGE,
    TABLES,
    Broken,
    Form,
    check_contents,
    form_of,
    opened,
    raise_if_passing,
    reason_of,
)
from foundling.data.readers.parquet import (
    Range,
    check_text_column,
    ranges,
    read_table,
    schema_of,
)
from foundling.data.readers.row_builder import RowBuilder, template_fields
from foundling.data.readers.source import (
    DEFAULTS,
    File,
    Kind,
    Piece,
    ReadOptions,
    Row,
    broken_off,
)
from foundling.data.readers.text import (
    Record,
    csv_names,
    is_lines,
    read_csv,
    read_json,
    read_jsonl,
    read_txt,
)

# Where a file may be cut, so that several processes can read it: by rows, never through one.
#
# Where the cuts fall depends on the file alone, so a build that is started again, or runs
# elsewhere, has the same pieces. Compressed text cannot be entered in the middle and stays in one
# piece.

LEAST_BYTES = 4 << 20
"""Smaller pieces cost more in starting them than they gain."""
MOST_PIECES = 64
"""A file of any size is enough work for this many processes, or a few more."""
_STEP = 1 << 20


@dataclass(frozen=True)
class RowRange:
    """A part of a file of lines: bytes `start` to `stop` (None: the end), and its first line."""

    start: int = 0
    stop: int | None = None
    first_line: int = 1


WHOLE = RowRange()


def cuts(file: File, form: Form) -> Iterator[Range | RowRange]:
    """The parts of a file, in order."""
    if form.format in TABLES:
        yield from ranges(file, form.format, LEAST_BYTES, MOST_PIECES)
    elif form.compression or file.local is None or form.format not in ("txt", "jsonl"):
        yield WHOLE
    else:
        yield from _spans(file, form.format == "txt")


def _spans(file: File, is_txt: bool) -> Iterator[RowRange]:
    """Parts that end with a row; lines are counted on the way."""
    start, first_line, stop = 0, 1, 0
    try:
        with file.open() as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            while stop < size:
                left, lines = max(LEAST_BYTES, size // MOST_PIECES), 0
                while left and (block := stream.read(min(left, _STEP))):
                    lines += block.count(b"\n")
                    left -= len(block)
                lines += _lines_to_row_end(stream, is_txt)
                stop = stream.tell()
                if stop == start:  # it is shorter now than when it was opened
                    break
                if stop < size:
                    yield RowRange(start, stop, first_line)
                    start, first_line = stop, first_line + lines
    except DAMAGE as error:
        raise_if_passing(error, file.name)
    yield RowRange(start, None, first_line)


def _lines_to_row_end(stream: BinaryIO, is_txt: bool) -> int:
    """Read on to the end of a line, of plain text to a blank one; how many lines end on the way."""
    lines, whole = 0, False
    while line := stream.readline(_STEP):
        ends = line.endswith(b"\n")
        lines += ends
        if ends and (not is_txt or (whole and not line.strip())):
            break
        whole = ends
    return lines


FIRST_ROWS = 64
"""How many rows of a file tell what it holds."""
CSV = {"csv": ",", "tsv": "\t"}
"""Formats of columns in text, and what separates them."""
FIRST_RECORDS = 4096
"""How many records are looked at to find them."""


@dataclass(frozen=True)
class FilePiece:
    """A part of a file, or all of it."""

    source: str
    file: File
    form: Form
    layout: ColumnMapping
    options: ReadOptions
    part: Range | RowRange = WHOLE
    limit: int | None = None
    """Rows after this many are left out."""

    @property
    def name(self) -> str:
        """The file's name, and where the part begins."""
        if isinstance(self.part, Range):
            return f"{self.file.name} from row {self.part.first_row}"
        return f"{self.file.name} from line {self.part.first_line}"

    def identity(self) -> str:
        """The file's own, the part, and everything that decides how it is read."""
        how = repr((self.form, self.layout, self.options, self.part, self.limit))
        digest = hashlib.blake2b(how.encode(), digest_size=8).hexdigest()
        return f"{self.name}: {self.file.identity()}, read as {digest}"

    def rows(self, tally: Counter[str] | None = None) -> Iterator[Row]:
        """Usable rows, and a row with a problem wherever there is one."""
        return islice(self._rows(Counter() if tally is None else tally), self.limit)

    def _rows(self, tally: Counter[str]) -> Iterator[Row]:
        maker = RowBuilder(
            source=self.source,
            file=self.file.name,
            layout=self.layout,
            options=self.options,
            tally=tally,
        )
        place = self.part.first_row if isinstance(self.part, Range) else self.part.first_line
        rows = 0
        row: Row | None = None
        try:
            for row in self._made(maker):
                rows += 1
                yield row
        except DAMAGE as error:
            raise_if_passing(error, self.file.name)
            if row is not None:
                place = int(row.where.rpartition(":")[2]) + 1
            # A table may be read from its middle, and its places are numbers of rows.
            rows = place if isinstance(self.part, Range) else rows
            lost = error.lost_rows(rows) if isinstance(error, Broken) else 0
            loss = f"; about {lost} rows are lost" if lost else ""
            reason = f"the file cannot be read from here on ({reason_of(error)}{loss})"
            yield maker.bad(reason, place, lost=lost)

    def _made(self, maker: RowBuilder) -> Iterator[Row]:
        filters = parse_filters(self.options.where)
        if isinstance(self.part, Range):
            yield from read_table(self.file, self.form.format, self.part, filters, maker)
            return
        for place, value in records(self.file, self.form, self.part):
            row = maker.record(value, place, filters)
            if row is not None:
                yield row


def records(file: File, form: Form, part: RowRange = WHOLE) -> Iterator[Record]:
    """What a file of text holds, place by place."""
    format = form.format
    with opened(file, form) as stream:
        if part.start:
            stream.seek(part.start)
        length = None if part.stop is None else part.stop - part.start
        if format == "json":
            yield from read_json(stream)
        elif format in CSV:
            yield from read_csv(stream, CSV[format])
        else:
            read = read_txt if format == "txt" else read_jsonl
            yield from read(stream, part.first_line, length)


class _Beginning(NamedTuple):
    """What the first rows of a file show."""

    form: Form
    rows: list[Collection[str]]
    """Names of the columns of each."""
    kept: list[Collection[str]]
    """The same of those that pass the filters."""
    strings: int = 0
    """How many are bare text."""
    odd: str = ""
    """Why one of them is neither."""
    schema: Any = None
    """Of a table."""
    columns: Sequence[str] = ()
    """Of a table or CSV: the names of all columns, as often as each is there."""


def _beginning(file: File, form: Form, filters: tuple[Filter, ...]) -> _Beginning:
    if form.format in TABLES:
        schema = schema_of(file, form.format)
        return _Beginning(form, [schema.names], [schema.names], schema=schema, columns=schema.names)
    rows: list[Collection[str]] = []
    kept: list[Collection[str]] = []
    columns: Sequence[str] = ()
    strings, odd = 0, ""
    try:
        if form.format in CSV:
            with opened(file, form) as stream:
                columns = csv_names(stream, CSV[form.format])
        if form.format == "json":
            with opened(file, form) as stream:
                form = replace(form, format="jsonl") if is_lines(stream) else form
        for _, value in islice(records(file, form), FIRST_RECORDS):
            if isinstance(value, dict):
                rows.append(value.keys())
                if all(filter.accepts(value) for filter in filters):
                    kept.append(value.keys())
            elif isinstance(value, str):
                strings += 1
            else:
                odd = odd or getattr(value, "reason", f"{type(value).__name__} in place of a row")
            if len(kept) + strings >= FIRST_ROWS:
                break
    except DAMAGE as error:
        raise_if_passing(error, file.name)
        odd = odd or reason_of(error)
    return _Beginning(form, rows, kept, strings, odd, columns=columns)


@dataclass(frozen=True)
class FileSource:
    """Text or conversations from files, in the order given."""

    name: str
    files: tuple[File, ...]
    documents: int | None = None
    options: ReadOptions = DEFAULTS

    @property
    def draws(self) -> bool:
        """Equal rows are the same row twice."""
        return False

    @cached_property
    def layouts(self) -> tuple[tuple[Form, ColumnMapping], ...]:
        """What each file holds; refuses files that do not go together, or cannot be opened."""
        found: list[tuple[File, Form, ColumnMapping | None]] = []
        for file in self.files:
            form = form_of(file.name)
            if form is None:
                raise DataError(f"{file.name} is of no format that can be read.")
            check_contents(file, form)
            found.append((file, *self._settled(file, form)))
        kinds = {layout.kind: file.name for file, _, layout in reversed(found) if layout}
        if len(kinds) > 1:
            raise DataError(
                f"{self.name} mixes text ({kinds['text']}) and conversations ({kinds['chat']});"
                " make a source of each."
            )
        # An empty file goes along with the others.
        known = next((layout for _, _, layout in found if layout), PLAIN)
        return tuple((form, layout or known) for _, form, layout in found)

    def _settled(self, file: File, form: Form) -> tuple[Form, ColumnMapping | None]:
        fields = template_fields(self.options.template)
        filters = parse_filters(self.options.where)
        if form.format == "txt":
            if fields or filters or self.options.text:
                raise ConfigError(f"{file.name} is plain text and has no columns to choose from.")
            if self.options.schema not in ("auto", "text"):
                raise ConfigError(f"{file.name} is plain text, not {self.options.schema}.")
            with file.open():
                return form, PLAIN
        begin = _beginning(file, form, filters)
        layout = detect_columns(file.name, begin.kept or begin.rows, begin.strings, self.options)
        if layout is None and begin.odd:
            raise DataError(
                f"{file.name} has no row that can be read ({begin.odd}); look at its beginning."
            )
        if layout is not None:
            check_once(file.name, columns_to_read(begin.columns, layout, fields, filters))
        if begin.schema is not None and layout is not None and layout.kind == "text":
            for column in layout.columns:
                check_text_column(file.name, begin.schema, column)
        check_columns(file.name, begin.rows, fields, "the template")
        check_columns(file.name, begin.rows, (one.column for one in filters), "a filter")
        return begin.form, layout

    @property
    def kind(self) -> Kind:
        """Documents or conversations, by the columns."""
        return self.layouts[0][1].kind if self.layouts else "text"

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """Names and checksums but no folders: the same files elsewhere are the same source."""
        with ThreadPoolExecutor() as pool:  # hashing leaves the interpreter free
            identities = list(pool.map(lambda file: file.identity(), self.files))
        files = {
            str(number): [file.name, identity, layout.schema]
            for number, (file, identity, (_, layout)) in enumerate(
                zip(self.files, identities, self.layouts, strict=True)
            )
        }
        return {
            "source": self.name,
            "files": files,
            "documents": self.documents,
            "read": self.options.changed(),
        }

    def pieces(self) -> Iterator[FilePiece]:
        """Every file, cut where it can be cut."""
        left = self.documents
        for file, (form, layout) in zip(self.files, self.layouts, strict=True):
            for part in cuts(file, form):
                if left is not None and left <= 0:
                    return
                piece = FilePiece(self.name, file, form, layout, self.options, part)
                if left is not None:
                    # Which rows are the first so many must be known before others read them.
                    piece = replace(piece, limit=left)
                    left -= sum(1 for _ in piece.rows())
                yield piece

    def __iter__(self) -> Iterator[Row]:
        return whole_rows(self.pieces(), self.options)


def whole_rows(pieces: Iterable[Piece], options: ReadOptions) -> Iterator[Row]:
    """All rows of all pieces; a file that breaks off is refused where that is not allowed."""
    for piece in pieces:
        for row in piece.rows():
            if row.lost is not None and not options.allow_broken_files:
                raise DataError(broken_off(row.where, row.problem or ""))
            yield row
