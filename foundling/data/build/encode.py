"""Phase 1 of a build: one piece of a source becomes part files.

A task is idempotent and knows nothing of other tasks, so it runs in this process, in a worker, on a
Ray cluster or in a SLURM array alike. Where a part ends depends on the rows alone. Parts that are
there from an earlier start, or that another worker has taken (several can share one piece: reading
is cheap against encoding), are not encoded again.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from foundling.data.build.decontaminate import Overlap
from foundling.data.build.part_files import PartFile, PartInfo, content_hashes, write_part
from foundling.data.readers.source import (
    Row,
    excerpt,
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

PART_ROWS = 16384
PART_CHARS = 8_000_000
"""A part ends at whichever of the two comes first: a second of work, and memory for it."""
PART_TEXTS = 4
"""Of every part so many texts are encoded by `tokenizers` too, and compared."""
END_NAME = "end.json"
TAKEN = ".taken"


@dataclass(frozen=True, kw_only=True)
class EncodeJob:
    """Everything that decides what a piece becomes, in plain values."""

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

    def mark(self, identity: str) -> str:
        """Name of what this job makes of a piece: other rows or another job, another name."""
        settled = {**asdict(self), "tokenizer": "", "overlap": bool(self.overlap)}
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


def chunks(piece: "Piece", job: EncodeJob) -> Iterator[tuple[list[Row], dict[str, int]]]:
    """Rows in runs, each with what the reader left out on the way; a run ends with the row that
    reaches one of the limits."""
    tally: Counter[str] = Counter()
    reported: Counter[str] = Counter()
    run: list[Row] = []
    chars = 0
    for row in piece.rows(tally):
        run.append(row)
        chars += _size(row)
        if len(run) >= job.part_rows or chars >= job.part_chars:
            yield run, dict(tally - reported)
            reported, run, chars = tally.copy(), [], 0
    # A reader that left out the last rows of all still has that to tell.
    if run or tally - reported:
        yield run, dict(tally - reported)


def _size(row: Row) -> int:
    """Characters, roughly: what a file holds may be anything."""
    if isinstance(row.text, str):
        return len(row.text)
    if isinstance(row.messages, Sequence):
        # Every value counts, so that the part stays bounded whatever the messages turn out to be.
        return sum(len(str(message)) for message in row.messages)
    return 200


def encode_rows(
    rows: list[Row], encoder: PieceEncoder, tally: dict[str, int] | None = None
) -> PartFile:
    """Encode what can be encoded and note the rest."""
    job, tokenizer, overlap = encoder
    usable: list[Row] = []
    places: list[int] = []
    quarantine: list[dict[str, Any]] = []
    for place, row in enumerate(rows):
        reason = unusable(row, job.chat)
        if reason is None:
            usable.append(row)
            places.append(place)
            continue
        note = {"row": place, "source": row.source, "where": row.where, "reason": reason}
        note |= {} if row.lost is None else {"lost": row.lost}
        quarantine.append({**note, "excerpt": excerpt(row)})
    documents = _documents(usable, encoder)
    if tokenizer.unk_id is not None:
        unknown = int(np.count_nonzero(documents.tokens == tokenizer.unk_id))
        tally = {**(tally or {}), "unknown_tokens": unknown}
    tokenizer.check_encoding([_said(row) for row in usable[:PART_TEXTS]])
    overlaps = np.zeros(len(usable), np.bool_)
    if overlap is not None:
        overlaps[:] = [overlap.touches(_said(row)) for row in usable]
    return PartFile(
        documents=documents,
        held_out=np.array([is_held_out(row, job.val_share) for row in usable], np.bool_),
        overlaps=overlaps,
        hashes=content_hashes(documents),
        row=np.array(places, np.int32),
        rows=len(rows),
        quarantine=quarantine,
        tally=tally or {},
    )


def _documents(usable: list[Row], encoder: PieceEncoder) -> Shard:
    """Texts between BOS and EOS, conversations as the tokenizer renders them."""
    job, tokenizer, _ = encoder
    width: type[Any] = np.uint32 if job.wide else np.uint16
    sizes = [text_bytes(row) for row in usable]
    mask = None
    if job.chat:
        chats = tokenizer.render_batch([row.messages or () for row in usable])
        lengths = np.array([len(chat.ids) for chat in chats], np.int64)
        tokens = np.fromiter((id for chat in chats for id in chat.ids), width, lengths.sum())
        mask = np.fromiter((one for chat in chats for one in chat.mask), np.uint8, len(tokens))
    else:
        texts = [row.text or "" for row in usable]
        tokens, lengths = tokenizer.encode_documents(texts, width)
    names = tuple(sorted({row.kind for row in usable}))
    floors = [np.nan if row.floor_bits is None else row.floor_bits for row in usable]
    return Shard(
        offsets=np.cumsum(np.append(0, lengths)),
        tokens=tokens,
        mask=mask,
        text_bytes=np.array(sizes, np.int64),
        kind_codes=np.array([names.index(row.kind) for row in usable], np.int32),
        kind_names=names,
        floor_bits=np.array(floors, np.float64),
    )


def _said(row: Row) -> str:
    """The text, or all that a conversation says."""
    if row.text is not None:
        return row.text
    return "\n".join(content for _, content in map(role_and_content, row.messages or ()))


def one_thread() -> None:
    """Keep the encoder to one thread: a worker is a core, and more would fight over it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
