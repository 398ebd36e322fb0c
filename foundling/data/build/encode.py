"""Phase 1 of a build: one piece of a source becomes part files.

A task is idempotent and knows nothing of other tasks, so it runs in this process, in a worker, on a
Ray cluster or in a SLURM array alike. Where a part ends depends on the rows alone. Before it
encodes a part the task asks whether to: the part may be there from an earlier start, another worker
may have taken it (several can share one piece: reading is cheap against encoding), or there is
enough.
"""

import hashlib
import json
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foundling.data.build.decontaminate import Overlap
from foundling.data.build.part_files import PartFile, PartInfo, content_hashes, write_part
from foundling.data.readers.source import (
    Row,
    Texts,
    excerpt,
    fall_into_val,
    flat,
    is_held_out,
    text_bytes,
    unusable,
)
from foundling.data.shard import Shard
from foundling.runtime.files import write_text_atomic
from foundling.tokenizer.chat import role_and_content
from foundling.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from foundling.data.readers.source import Piece

# The rows of a part, sorted into what can be encoded and what cannot, as columns.
#
# Nearly all rows are plain documents of a table, which come together (`Texts`) and are looked at
# together: a Python object for each would cost a tenth of a build. Whatever is special goes the
# long way, by the functions that say what a row must be.

EncodeBatch = Row | Texts


@dataclass
class Sorted:
    """Rows that can be used, column by column, and those that cannot."""

    contents: list[Any] = field(default_factory=list)
    """A text, or the messages of a conversation."""
    kinds: list[str] = field(default_factory=list)
    floors: list[float] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """Number of each row within the part."""
    sizes: list[int] = field(default_factory=list)
    held_out: list[NDArray[np.bool_]] = field(default_factory=list)
    quarantine: list[dict[str, Any]] = field(default_factory=list)
    rows: int = 0
    """Of both sorts."""


def parts_of(
    lots: Iterable[EncodeBatch], most_rows: int, most_chars: int
) -> Iterator[list[EncodeBatch]]:
    """Lots in runs: one ends with the row that reaches either limit, however the rows came
    together; the last may be empty."""
    run: list[EncodeBatch] = []
    count = chars = 0
    for lot in lots:
        while isinstance(lot, Texts) and lot.texts:
            reached = list(accumulate(map(len, lot.texts)))
            # Rows until one of the limits is reached; more than there are where none is.
            cut = min(bisect_left(reached, most_chars - chars) + 1, most_rows - count)
            run.append(lot.upto(cut))
            if cut > len(reached):
                count, chars = count + len(reached), chars + reached[-1]
                break
            yield run
            run, count, chars = [], 0, 0
            lot = lot.after(cut)
        if isinstance(lot, Row):
            run.append(lot)
            count, chars = count + 1, chars + _size(lot)
            if count >= most_rows or chars >= most_chars:
                yield run
                run, count, chars = [], 0, 0
    yield run


def _size(row: Row) -> int:
    """Characters, roughly: what a file holds may be anything."""
    if isinstance(row.text, str):
        return len(row.text)
    if isinstance(row.messages, Sequence):
        # Every value counts, so that the part stays bounded whatever the messages turn out to be.
        return sum(len(str(message)) for message in row.messages)
    return 200


def sort(lots: Iterable[EncodeBatch], *, chat: bool, val_share: float) -> Sorted:
    """What can be encoded, and the rest with its reasons."""
    found = Sorted()
    for lot in lots:
        if not chat and isinstance(lot, Texts) and _take_together(lot, val_share, found):
            continue
        for row in flat([lot]):
            _take(row, chat, val_share, found)
    return found


def _take_together(lot: Texts, val_share: float, found: Sorted) -> bool:
    """Take documents of which none is special; False where one is."""
    texts = lot.texts
    try:
        contents = [text.encode() for text in texts]
    except UnicodeEncodeError:
        return False
    if any(not content or b"\x00" in content for content in contents):
        return False
    if any(text.isspace() for text in texts):
        return False
    found.contents += texts
    found.kinds += ["text"] * len(texts)
    found.floors += [np.nan] * len(texts)
    found.places += range(found.rows, found.rows + len(texts))
    found.sizes += map(len, contents)
    found.held_out.append(fall_into_val(contents, val_share))
    found.rows += len(texts)
    return True


def _take(row: Row, chat: bool, val_share: float, found: Sorted) -> None:
    reason = unusable(row, chat)
    place, found.rows = found.rows, found.rows + 1
    if reason is not None:
        note = {"row": place, "source": row.source, "where": row.where, "reason": reason}
        note |= {} if row.lost is None else {"lost": row.lost}
        found.quarantine.append({**note, "excerpt": excerpt(row)})
        return
    found.contents.append(row.messages or () if chat else row.text)
    found.kinds.append(row.kind)
    found.floors.append(np.nan if row.floor_bits is None else row.floor_bits)
    found.places.append(place)
    found.sizes.append(text_bytes(row))
    found.held_out.append(np.array([is_held_out(row, val_share)]))


PART_ROWS = 16384
PART_CHARS = 8_000_000
"""A part ends at whichever of the two comes first: a second of work, and memory for it."""
PART_TEXTS = 4
"""Of every part so many texts are encoded by `tokenizers` too, and compared."""
END_NAME = "end.json"
TAKEN = ".taken"


@dataclass(frozen=True, kw_only=True)
class EncodeJob:
    """Everything that decides what a piece becomes: plain values that travel as JSON."""

    tokenizer: str
    """Folder that workers load it from."""
    chat: bool
    val_share: float
    wide: bool
    """Tokens need 32 bits."""
    part_rows: int
    part_chars: int
    overlap: str = ""
    """File of the passages of evaluation sets, where text is held against them."""

    def to_json(self) -> dict[str, Any]:
        """As a file carries it to another machine."""
        return asdict(self)

    def mark(self, identity: str) -> str:
        """Name of what this job makes of a piece: other rows or another job, another name."""
        settled = {**self.to_json(), "tokenizer": "", "overlap": bool(self.overlap)}
        text = json.dumps([settled, identity], sort_keys=True)
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()

    def open(self, tokenizer: Tokenizer | None = None) -> "PieceEncoder":
        """Load what the work needs, in the process that will do it."""
        overlap = Overlap.load(Path(self.overlap)) if self.overlap else None
        return PieceEncoder(self, tokenizer or Tokenizer.load(self.tokenizer), overlap)


class PieceEncoder(NamedTuple):
    """A job with its tokenizer loaded."""

    job: EncodeJob
    tokenizer: Tokenizer
    overlap: Overlap | None


class Finished(NamedTuple):
    """A part that was written."""

    number: int
    info: PartInfo


def run_task(
    encoder: PieceEncoder,
    piece: "Piece",
    folder: Path,
    *,
    shared: bool = False,
    durable: bool = False,
) -> Iterator[Finished]:
    """Write the parts of a piece that are not there, and how many there are once that is known;
    one that is `shared` with other workers of this machine, only those that nobody has taken."""
    folder.mkdir(exist_ok=True)  # without parents: when they are gone, the build is over
    number = 0
    for number, (rows, tally) in enumerate(chunks(piece, encoder.job), 1):
        path = part_path(folder, number - 1)
        if path.is_file() or (shared and not _is_free(path)):
            continue
        part = encode_rows(rows, encoder, tally)
        yield Finished(number - 1, write_part(path, part, durable=durable))
    write_text_atomic(folder / END_NAME, json.dumps({"parts": number}) + "\n", durable=durable)


def _is_free(path: Path) -> bool:
    """Take a part for this worker, unless another has; a start of the build lets all go again."""
    try:
        path.with_suffix(TAKEN).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def run_alone(encoder: PieceEncoder, piece: "Piece", folder: Path) -> None:
    """A task on another machine, which has its piece to itself."""
    try:
        for _ in run_task(encoder, piece, folder, durable=True):
            pass
    except FileNotFoundError:
        if folder.parent.is_dir():
            raise
        # Another worker's part was the last that was needed, and the parts are gone.


def part_path(folder: Path, number: int) -> Path:
    """Where a part of a piece lies."""
    return folder / f"{number:06d}.arrow"


def parts_in_all(folder: Path) -> int | None:
    """How many parts a piece has; None until it was read to its end."""
    try:
        return int(json.loads((folder / END_NAME).read_text())["parts"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None  # not there, or torn by a power cut


def chunks(piece: "Piece", job: EncodeJob) -> Iterator[tuple[list[EncodeBatch], dict[str, int]]]:
    """Rows in runs, each with what the reader left out on the way."""
    tally: Counter[str] = Counter()
    reported: Counter[str] = Counter()
    lots = getattr(piece, "lots", piece.rows)(tally)
    for run in parts_of(lots, job.part_rows, job.part_chars):
        # A reader that left out the last rows of all still has that to tell.
        if run or tally - reported:
            yield run, dict(tally - reported)
            reported = tally.copy()


def encode_rows(
    lots: list[EncodeBatch], encoder: PieceEncoder, tally: dict[str, int] | None = None
) -> PartFile:
    """Encode what can be encoded and note the rest."""
    job = encoder.job
    found = sort(lots, chat=job.chat, val_share=job.val_share)
    documents = _documents(found, encoder)
    if encoder.tokenizer.unk_id is not None:
        unknown = int(np.count_nonzero(documents.tokens == encoder.tokenizer.unk_id))
        tally = {**(tally or {}), "unknown_tokens": unknown}
    some = found.contents[:PART_TEXTS]
    encoder.tokenizer.check_encoding([_said(chat) for chat in some] if job.chat else some)
    return PartFile(
        documents=documents,
        held_out=np.concatenate([np.empty(0, np.bool_), *found.held_out]),
        overlaps=_overlaps(found.contents, encoder),
        hashes=content_hashes(documents),
        row=np.array(found.places, np.int32),
        rows=found.rows,
        quarantine=found.quarantine,
        tally=tally or {},
    )


def _documents(found: Sorted, encoder: PieceEncoder) -> Shard:
    names = tuple(sorted(set(found.kinds)))
    codes = {name: code for code, name in enumerate(names)}
    encode = _chats if encoder.job.chat else _texts
    offsets, tokens, mask = encode(found, encoder)
    return Shard(
        offsets=offsets,
        tokens=tokens,
        mask=mask,
        text_bytes=np.array(found.sizes, np.int64),
        kind_codes=np.array([codes[kind] for kind in found.kinds], np.int32),
        kind_names=names,
        floor_bits=np.array(found.floors, np.float64),
    )


def _texts(
    found: Sorted, encoder: PieceEncoder
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.uint8] | None]:
    """Each text between BOS and EOS."""
    tokens, lengths = encoder.tokenizer.encode_documents(
        found.contents, _width(encoder.job), found.sizes
    )
    return np.cumsum(np.append(0, lengths)), tokens, None


def _chats(
    found: Sorted, encoder: PieceEncoder
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.uint8] | None]:
    """Each conversation as the tokenizer renders it."""
    chats = encoder.tokenizer.render_batch(found.contents)
    offsets = np.cumsum([0, *(len(chat.ids) for chat in chats)], dtype=np.int64)
    tokens = np.empty(int(offsets[-1]), _width(encoder.job))
    mask = np.empty(len(tokens), np.uint8)
    for chat, (start, stop) in zip(chats, pairwise(offsets.tolist()), strict=True):
        tokens[start:stop] = chat.ids
        mask[start:stop] = chat.mask
    return offsets, tokens, mask


def _width(job: EncodeJob) -> type[Any]:
    return np.uint32 if job.wide else np.uint16


def _overlaps(contents: list[Any], encoder: PieceEncoder) -> NDArray[np.bool_]:
    overlap = encoder.overlap
    if overlap is None:
        return np.zeros(len(contents), np.bool_)
    texts = map(_said, contents) if encoder.job.chat else contents
    return np.array([overlap.touches(text) for text in texts], np.bool_)


def _said(messages: Sequence[Any]) -> str:
    """All that a conversation says."""
    return "\n".join(content for _, content in map(role_and_content, messages))


def one_thread() -> None:
    """Keep the encoder to one thread: a worker is a core, and more would fight over it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
