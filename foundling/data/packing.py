"""How the documents of a shard become units: a pure function of the shard and the PackingSpec.

Every policy keeps the same account: **every token is an input exactly once an epoch, and every
token but a document's first is a target exactly once.** A row looks one token ahead (so T + 1
tokens are read) and only within a document.

- `concat`: the shard is one stream cut every T tokens. A row is arithmetic; nothing is stored.
- `bestfit`: a row starts at a document, or at the continuation of one that is longer than a row.
  Only such documents are cut, into pieces of T; the rest goes into the fullest row with room for it
  (best fit, longest first), and what stays free is padding.
- `pad`: a row is one document, or a piece of T of one that is longer.
- `bucket`: likewise, and a unit is not a row but a micro-batch of rows of about the same length, of
  about as many tokens as every other unit.

Rejected: packing on the fly in a buffer (the buffer is state that a resume must restore, and has
been the cause of repeated data elsewhere), and cropping documents to fill rows (text is lost).
"""

import zlib
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foundling.config.errors import DataError
from foundling.config.packing_spec import ALL_PARTS, PART_COUNT, PackedSize, PackingSpec
from foundling.data.permutation import scattered
from foundling.data.shard import Shard, numbers, ragged, read_arrow, write_arrow

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class StreamPlan:
    """concat of a whole shard: row r is tokens [r * T, (r + 1) * T)."""

    tokens: int
    seq_len: int

    @property
    def units(self) -> int:
        """Rows of the shard; the last may be padded."""
        return -(-self.tokens // self.seq_len)

    def shape(self, unit: int) -> tuple[int, int]:
        """Rows and positions of a row of one unit."""
        return (1, self.seq_len)


@dataclass(frozen=True)
class PiecePlan:
    """Row r is the pieces [first[r], first[r + 1])."""

    seq_len: int
    first: Numbers
    starts: Numbers
    """Where each piece starts in the shard's tokens."""
    lengths: NDArray[np.int32]
    """Input positions of each piece."""
    continues: NDArray[np.uint8]
    """1 where the document goes on in another row, so that the last position has a target."""

    @property
    def rows(self) -> int:
        """Rows of the shard."""
        return len(self.first) - 1

    @property
    def units(self) -> int:
        """The same: a unit is a row."""
        return self.rows

    @property
    def positions(self) -> int:
        """Input positions of all units, padding included."""
        return self.rows * self.seq_len

    @cached_property
    def tokens(self) -> int:
        """Positions that hold something."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def cuts(self) -> int:
        """Places where a document was cut."""
        return int(np.count_nonzero(self.continues))

    @property
    def size(self) -> PackedSize:
        """What the rows amount to."""
        documents = len(self.lengths) - self.cuts  # each has one piece that is its last
        return PackedSize(self.units, self.positions, self.tokens, documents, self.cuts)

    def shape(self, unit: int) -> tuple[int, int]:
        """Rows and positions of a row of one unit."""
        return (1, self.seq_len)


@dataclass(frozen=True)
class BucketPlan:
    """Unit u is the rows [first[u], first[u + 1]) of `pieces`, each of one piece."""

    pieces: PiecePlan
    first: Numbers
    heights: Numbers
    """Rows of each unit, whether there is a document for each or not: few shapes compile once."""
    widths: Numbers
    """Positions of a row of each unit."""

    @property
    def units(self) -> int:
        """Micro-batches of the shard."""
        return len(self.widths)

    @property
    def positions(self) -> int:
        """Input positions of all units, padding included."""
        return int((self.heights * self.widths).sum())

    @property
    def size(self) -> PackedSize:
        """What the units amount to."""
        return replace(self.pieces.size, units=self.units, positions=self.positions)

    def shape(self, unit: int) -> tuple[int, int]:
        """Rows and positions of a row of one unit."""
        return (int(self.heights[unit]), int(self.widths[unit]))


Plan = StreamPlan | PiecePlan | BucketPlan


def pack(offsets: Numbers, spec: PackingSpec, chosen: NDArray[np.bool_] | None = None) -> Plan:
    """Units of a shard whose documents are at these offsets; of the `chosen` documents only."""
    if spec.packing == "concat" and chosen is None:
        return StreamPlan(int(offsets[-1]), spec.seq_len)
    return units_of(pack_pieces(offsets, spec, chosen), spec)


def is_stream(spec: PackingSpec) -> bool:
    """Whether units are slices of the stored tokens, which needs no plan."""
    return spec.packing == "concat" and spec.part == ALL_PARTS


def pack_pieces(
    offsets: Numbers, spec: PackingSpec, chosen: NDArray[np.bool_] | None = None
) -> PiecePlan:
    """Rows of pieces, for every packing but a stream."""
    starts, lengths = offsets[:-1].astype(np.int64), np.diff(offsets).astype(np.int64)
    if chosen is not None:
        starts, lengths = starts[chosen], lengths[chosen]
    document, within, size = _pieces(lengths, spec)
    row = _rows(document, within, size, lengths, spec)
    order = np.argsort(row, kind="stable")  # rows in turn, pieces in order of placement
    document, within, size, row = document[order], within[order], size[order], row[order]
    rows = int(row[-1]) + 1 if len(row) else 0
    return PiecePlan(
        seq_len=spec.seq_len,
        first=np.searchsorted(row, np.arange(rows + 1)).astype(np.int64),
        starts=starts[document] + within,
        lengths=size.astype(np.int32),
        continues=(within + size < lengths[document]).astype(np.uint8),
    )


def units_of(pieces: PiecePlan, spec: PackingSpec) -> PiecePlan | BucketPlan:
    """Rows as units; with buckets, as many rows of one bucket as its micro-batch holds."""
    if spec.packing != "bucket":
        return pieces
    bucket = np.searchsorted(spec.edges, pieces.lengths)
    per_bucket = np.bincount(bucket, minlength=len(spec.edges))
    heights = np.array([spec.rows_in(edge) for edge in spec.edges], np.int64)
    units = -(-per_bucket // heights)
    which = np.repeat(np.arange(len(spec.edges)), units)
    number = np.arange(len(which)) - np.repeat(np.cumsum(units) - units, units)
    before = np.cumsum(per_bucket) - per_bucket
    first = before[which] + number * heights[which]
    return BucketPlan(
        pieces=pieces,
        first=np.append(first, len(pieces.lengths)).astype(np.int64),
        heights=heights[which],
        widths=np.array(spec.edges, np.int64)[which],
    )


def _pieces(lengths: Numbers, spec: PackingSpec) -> tuple[Numbers, Numbers, Numbers]:
    """Document, place in it and length of each piece, in the order in which they are placed."""
    if spec.packing == "concat":
        return _stream_pieces(lengths, spec.seq_len)
    number = -(-lengths // spec.seq_len)
    document = np.repeat(np.arange(len(lengths)), number)
    place = np.arange(len(document)) - np.repeat(np.cumsum(number) - number, number)
    within = place * spec.seq_len
    size = np.minimum(spec.seq_len, lengths[document] - within)
    if spec.packing == "pad":
        return document, within, size
    by = np.searchsorted(spec.edges, size) if spec.packing == "bucket" else -size
    order = np.argsort(by, kind="stable")  # by bucket, or longest first; then in stored order
    return document[order], within[order], size[order]


def _stream_pieces(lengths: Numbers, seq_len: int) -> tuple[Numbers, Numbers, Numbers]:
    """The documents as one stream, cut where a document or a row ends."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    edges = np.union1d(ends, np.arange(seq_len, total, seq_len)).astype(np.int64)
    edges = edges[edges > 0]
    begins = np.concatenate([[0], edges[:-1]]).astype(np.int64)[: len(edges)]
    document = np.searchsorted(ends, begins, side="right")
    return document, begins - (ends - lengths)[document], edges - begins


def _rows(
    document: Numbers, within: Numbers, size: Numbers, lengths: Numbers, spec: PackingSpec
) -> Numbers:
    """The row of each piece."""
    if spec.packing == "concat":
        return ((np.cumsum(lengths) - lengths)[document] + within) // spec.seq_len
    return _place(size, spec.seq_len) if spec.packing == "bestfit" else np.arange(len(size))


def _place(size: Numbers, seq_len: int) -> Numbers:
    """Row of each piece, best fit decreasing; pieces of one length are placed together.

    `rows_with[c]` are the rows with c positions free, and bit c of `some` says there are any, so
    the tightest row that fits is one shift and a lowest bit: no search over rows.
    """
    placed = np.empty(len(size), np.int64)
    seq_len = min(seq_len, int(size.sum()))  # room for all is as good as more, and is listed
    rows_with: list[list[int]] = [[] for _ in range(seq_len + 1)]
    some = 0
    opened = 0
    at = 0
    values, counts = np.unique(-size, return_counts=True)
    for length, count in zip((-values).tolist(), counts.tolist(), strict=True):
        end = at + count
        while at < end:
            fitting = some >> length
            if fitting:
                free = length + (fitting & -fitting).bit_length() - 1
                stack = rows_with[free]
                taken = stack[-(end - at) :]
                del stack[-(end - at) :]
                if not stack:
                    some &= ~(1 << free)
            else:
                free = seq_len
                new = -(-(end - at) // (seq_len // length))
                taken = list(range(opened, opened + new))
                opened += new
            placed[at : at + len(taken)] = taken
            at += len(taken)
            if free > length:
                rows_with[free - length].extend(taken)
                some |= 1 << (free - length)
    return placed


# Plans are cached next to their shards, so that packing is computed once per data set.
#
# The name carries the shard's checksum and the packing, and the file its own checksum: a stale or
# damaged plan is computed again, never believed. Several ranks may write at once; each writes the
# same bytes under its own temporary name. A folder that cannot be written to costs time and nothing
# else.

_trusted: set[tuple[Path, int, int]] = set()
"""Plan files whose checksum was right when this process first read them (with size and time)."""


def plan_for(shard: Shard, path: Path, sha256: str, spec: PackingSpec) -> Plan:
    """The units of a shard, from the cache where it holds them."""
    if is_stream(spec):
        return StreamPlan(len(shard.tokens), spec.seq_len)
    file = path.with_name(f"{path.stem}.{spec.label}-{sha256[:16]}.plan")
    owner = f"{spec.label} {sha256}"
    cached = _read(file, spec, owner)
    if cached is not None:
        return units_of(cached, spec)
    pieces = pack_pieces(shard.offsets, spec, chosen(sha256, len(shard), spec))
    with suppress(OSError):
        _write(file, pieces, owner)
    return units_of(pieces, spec)


def chosen(sha256: str, documents: int, spec: PackingSpec) -> NDArray[np.bool_] | None:
    """Which documents of a shard the spec's part holds; None means all.

    The hash is of the shard's checksum and the document's place in it, so a document stays in its
    part however the data set grows, and nothing has to be read.
    """
    if spec.part == ALL_PARTS:
        return None
    bits = PART_COUNT.bit_length() - 1
    part = scattered(np.arange(documents), f"part of {sha256}") >> np.uint64(64 - bits)
    return (part >= spec.part[0]) & (part < spec.part[1])


def _checksum(plan: PiecePlan, owner: str) -> bytes:
    # Against damage, not against malice; and it is in the way of every first read of a plan, where
    # it costs a third of a sha256.
    found = zlib.crc32(owner.encode())
    for array in (plan.first, plan.starts, plan.lengths, plan.continues):
        found = zlib.crc32(np.ascontiguousarray(array).data, found)
    return str(found).encode()


def _write(file: Path, plan: PiecePlan, owner: str) -> None:
    columns = {
        "starts": ragged(plan.first, plan.starts),
        "lengths": ragged(plan.first, plan.lengths),
        "continues": ragged(plan.first, plan.continues),
    }
    batch = pa.RecordBatch.from_pydict(columns)
    write_arrow(file, batch.replace_schema_metadata({"crc32": _checksum(plan, owner)}))


def _read(file: Path, spec: PackingSpec, owner: str) -> PiecePlan | None:
    """The cached plan, or None when there is none that can be trusted."""
    try:
        found = file.stat()
        batch = read_arrow(file)
        starts = batch.column("starts")
        plan = PiecePlan(
            seq_len=spec.seq_len,
            first=numbers(starts.offsets),
            starts=numbers(starts.values),
            lengths=numbers(batch.column("lengths").values),
            continues=numbers(batch.column("continues").values),
        )
        stated = (batch.schema.metadata or {}).get(b"crc32")
    except (OSError, DataError, KeyError, AttributeError, pa.ArrowException):
        return None
    identity = (file, found.st_size, found.st_mtime_ns)
    if identity not in _trusted:
        if stated != _checksum(plan, owner):
            return None
        _trusted.add(identity)
    return plan
