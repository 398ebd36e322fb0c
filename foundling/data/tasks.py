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
from foundling.data.shard import Shard
from foundling.data.sorting import Lot, Sorted, parts_of, sort
from foundling.data.spool import Part, PartInfo, content_hashes, write_part
from foundling.runtime.files import write_text_atomic
from foundling.tokenizer import Tokenizer
from foundling.tokenizer.chat import role_and_content

if TYPE_CHECKING:
    from foundling.data.sources.base import Piece

PART_ROWS = 16384
PART_CHARS = 8_000_000
"""A part ends at whichever of the two comes first: a second of work, and memory for it."""
PART_TEXTS = 4
"""Of every part so many texts are encoded by `tokenizers` too, and compared."""
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


def chunks(piece: "Piece", job: Job) -> Iterator[tuple[list[Lot], dict[str, int]]]:
    """Rows in runs, each with what the reader left out on the way."""
    tally: Counter[str] = Counter()
    told: Counter[str] = Counter()
    lots = getattr(piece, "lots", piece.rows)(tally)
    for run in parts_of(lots, job.part_rows, job.part_chars):
        # A reader that left out the last rows of all still has that to tell.
        if run or tally - told:
            yield run, dict(tally - told)
            told = tally.copy()


def encode_rows(lots: list[Lot], encoder: Encoder, tally: dict[str, int] | None = None) -> Part:
    """Encode what can be encoded and note the rest."""
    job = encoder.job
    found = sort(lots, chat=job.chat, val_share=job.val_share)
    documents = _documents(found, encoder)
    if encoder.tokenizer.unk_id is not None:
        unknown = int(np.count_nonzero(documents.tokens == encoder.tokenizer.unk_id))
        tally = {**(tally or {}), "unknown_tokens": unknown}
    some = found.contents[:PART_TEXTS]
    encoder.tokenizer.check_encoding([_said(chat) for chat in some] if job.chat else some)
    return Part(
        documents=documents,
        held_out=np.concatenate([np.empty(0, np.bool_), *found.held_out]),
        overlaps=_overlaps(found.contents, encoder),
        hashes=content_hashes(documents),
        row=np.array(found.places, np.int32),
        rows=found.rows,
        quarantine=found.quarantine,
        tally=tally or {},
    )


def _documents(found: Sorted, encoder: Encoder) -> Shard:
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
    found: Sorted, encoder: Encoder
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.uint8] | None]:
    """Each text between BOS and EOS."""
    tokens, lengths = encoder.tokenizer.encode_documents(
        found.contents, _width(encoder.job), found.sizes
    )
    return np.cumsum(np.append(0, lengths)), tokens, None


def _chats(
    found: Sorted, encoder: Encoder
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


def _width(job: Job) -> type[Any]:
    return np.uint32 if job.wide else np.uint16


def _overlaps(contents: list[Any], encoder: Encoder) -> NDArray[np.bool_]:
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
