"""Phase 1 of a build: one piece of a source becomes part files.

A task is idempotent and knows nothing of other tasks, so it runs in this process, in a worker, on a
Ray cluster or in a SLURM array alike. Where a part ends depends on the rows alone. Before it
encodes a part the task asks whether to: the part may be there from an earlier start, another worker
may have taken it (several can share one piece: reading is cheap beside encoding), or there is
enough.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foundling.data.decontaminate import Overlap
from foundling.data.rows import (
    Row,
    excerpt,
    falls_into_val,
    is_held_out,
    text_bytes,
    unusable,
)
from foundling.data.shard import Shard
from foundling.data.spool import Part, PartInfo, content_hashes, write_part
from foundling.runtime.files import write_text_atomic
from foundling.tokenizer import Tokenizer
from foundling.tokenizer.chat import role_and_content

if TYPE_CHECKING:
    from foundling.data.sources.base import Piece

PART_ROWS = 16384
PART_CHARS = 8_000_000
"""A part ends at whichever of the two comes first: a second of work, and memory for it."""
END_NAME = "end.json"

Verdict = Literal["take", "skip", "stop"]
Claim = Callable[[int], Verdict]


@dataclass(frozen=True, kw_only=True)
class Job:
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

    def open(self, tokenizer: Tokenizer | None = None) -> "Encoder":
        """Load what the work needs, in the process that will do it."""
        overlap = Overlap.load(Path(self.overlap)) if self.overlap else None
        return Encoder(self, tokenizer or Tokenizer.load(self.tokenizer), overlap)


class Encoder(NamedTuple):
    """A job with its tokenizer loaded."""

    job: Job
    tokenizer: Tokenizer
    overlap: Overlap | None


class Finished(NamedTuple):
    """A part that was written."""

    number: int
    info: PartInfo


def run_task(
    encoder: Encoder, piece: "Piece", folder: Path, claim: Claim, *, durable: bool = False
) -> Iterator[Finished]:
    """Write the parts of a piece that `claim` allows, and how many there are once that is known."""
    folder.mkdir(exist_ok=True)  # without parents: when they are gone, the build is over
    number = 0
    for number, (rows, tally) in enumerate(chunks(piece, encoder.job), 1):
        verdict = claim(number - 1)
        if verdict == "stop":
            return
        if verdict == "take":
            part = encode_rows(rows, encoder, tally)
            path = part_path(folder, number - 1)
            yield Finished(number - 1, write_part(path, part, durable=durable))
    write_text_atomic(folder / END_NAME, json.dumps({"parts": number}) + "\n", durable=durable)


def run_alone(encoder: Encoder, piece: "Piece", folder: Path) -> None:
    """A task on another machine, which has its piece to itself: encode what is not there."""

    def claim(number: int) -> Verdict:
        return "skip" if part_path(folder, number).is_file() else "take"

    try:
        for _ in run_task(encoder, piece, folder, claim, durable=True):
            pass
    except FileNotFoundError:
        if folder.parent.is_dir():
            raise
        # Somebody else's part was the last that was needed, and the parts are gone.


def part_path(folder: Path, number: int) -> Path:
    """Where a part of a piece lies."""
    return folder / f"{number:06d}.arrow"


def parts_in_all(folder: Path) -> int | None:
    """How many parts a piece has; None as long as nobody has read it to its end."""
    try:
        return int(json.loads((folder / END_NAME).read_text())["parts"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None  # not there, or torn by a power cut


def chunks(piece: "Piece", job: Job) -> Iterator[tuple[list[Row], dict[str, int]]]:
    """Rows in runs, each with what the reader left out on the way."""
    tally: Counter[str] = Counter()
    told: Counter[str] = Counter()
    chunk: list[Row] = []
    chars = 0
    for row in piece.rows(tally):
        chunk.append(row)
        chars += _size(row)
        if len(chunk) >= job.part_rows or chars >= job.part_chars:
            yield chunk, dict(tally - told)
            told, chunk, chars = tally.copy(), [], 0
    # A reader that left out the last rows of all still has that to tell.
    if chunk or tally - told:
        yield chunk, dict(tally - told)


def _size(row: Row) -> int:
    """Characters, roughly: what a file holds may be anything."""
    if isinstance(row.text, str):
        return len(row.text)
    if isinstance(row.messages, Sequence):
        # Every value counts, so that the part stays bounded whatever the messages turn out to be.
        return sum(len(str(message)) for message in row.messages)
    return 200


class _Sorted(NamedTuple):
    """Rows that can be used, with what was found out on the way, and those that cannot."""

    good: list[Row]
    places: list[int]
    sizes: list[int]
    held_out: list[bool]
    quarantine: list[dict[str, Any]]


def encode_rows(rows: list[Row], encoder: Encoder, tally: dict[str, int] | None = None) -> Part:
    """Encode what can be encoded and note the rest."""
    found = _sort(rows, encoder.job)
    documents = _documents(found, encoder)
    return Part(
        documents=documents,
        held_out=np.array(found.held_out, np.bool_),
        overlaps=_overlaps(found.good, encoder.overlap),
        hashes=content_hashes(documents),
        row=np.array(found.places, np.int32),
        rows=len(rows),
        quarantine=found.quarantine,
        tally=tally or {},
    )


def _sort(rows: list[Row], job: Job) -> _Sorted:
    found = _Sorted([], [], [], [], [])
    for place, row in enumerate(rows):
        content = _plain(row) if not job.chat else None
        reason = None if content is not None else unusable(row, job.chat)
        if reason is not None:
            found.quarantine.append(
                {
                    "row": place,
                    "source": row.source,
                    "where": row.where,
                    "reason": reason,
                    "excerpt": excerpt(row),
                }
            )
            continue
        found.good.append(row)
        found.places.append(place)
        if content is None:
            found.sizes.append(text_bytes(row))
            found.held_out.append(is_held_out(row, job.val_share))
        else:
            found.sizes.append(len(content))
            found.held_out.append(falls_into_val(content, job.val_share))
    return found


def _plain(row: Row) -> bytes | None:
    """The bytes of a text that is nothing special, which nearly all are; None sends it the long
    way, by the functions that say what a text must be. Encoding it once instead of three times is
    a hundredth of a build."""
    text = row.text
    if not isinstance(text, str) or row.problem is not None or row.split is not None:
        return None
    try:
        content = text.encode()
    except UnicodeEncodeError:
        return None
    return content if content and b"\x00" not in content and not text.isspace() else None


def _documents(found: _Sorted, encoder: Encoder) -> Shard:
    rows = found.good
    names = tuple(sorted({row.kind for row in rows}))
    codes = {name: code for code, name in enumerate(names)}
    floors = [np.nan if row.floor_bits is None else row.floor_bits for row in rows]
    offsets, tokens, mask = _chats(rows, encoder) if encoder.job.chat else _texts(rows, encoder)
    return Shard(
        offsets=offsets,
        tokens=tokens,
        mask=mask,
        text_bytes=np.array(found.sizes, np.int64),
        kind_codes=np.array([codes[row.kind] for row in rows], np.int32),
        kind_names=names,
        floor_bits=np.array(floors, np.float64),
    )


def _texts(rows: list[Row], encoder: Encoder) -> tuple[NDArray[np.int64], NDArray[Any], None]:
    """Each text between BOS and EOS."""
    texts = [row.text or "" for row in rows]
    tokens, lengths = encoder.tokenizer.encode_documents(texts, _width(encoder.job))
    return np.cumsum(np.append(0, lengths)), tokens, None


def _chats(
    rows: list[Row], encoder: Encoder
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.uint8]]:
    """Each conversation as the tokenizer renders it."""
    chats = encoder.tokenizer.render_batch([row.messages or () for row in rows])
    offsets = np.cumsum([0, *(len(chat.ids) for chat in chats)], dtype=np.int64)
    tokens = np.empty(int(offsets[-1]), _width(encoder.job))
    mask = np.empty(len(tokens), np.uint8)
    for chat, (start, stop) in zip(chats, pairwise(offsets.tolist()), strict=True):
        tokens[start:stop] = chat.ids
        mask[start:stop] = chat.mask
    return offsets, tokens, mask


def _width(job: Job) -> type[Any]:
    return np.uint32 if job.wide else np.uint16


def _overlaps(rows: list[Row], overlap: Overlap | None) -> NDArray[np.bool_]:
    if overlap is None:
        return np.zeros(len(rows), np.bool_)
    return np.array([overlap.touches(plain_text(row)) for row in rows], np.bool_)


def plain_text(row: Row) -> str:
    """All that a row says."""
    if row.text is not None:
        return row.text
    return "\n".join(content for _, content in map(role_and_content, row.messages or ()))


def one_thread() -> None:
    """Keep the encoder to one thread: a worker is a core, and more would fight over it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
