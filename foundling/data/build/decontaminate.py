"""Text that overlaps an evaluation set, found by runs of 13 words.

Text is brought to lower-case words without punctuation; every run of 13 words of the evaluation
sets is kept, and a document that holds one of them is removed. A run is known by a rolling 64-bit
hash, computed for a whole document at once, and a match is confirmed by a 128-bit one, so no
document is removed by chance. Rejected: a Bloom filter (its false matches remove good text), and
removing only the passage (it leaves half of a question and half of an answer).
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foundling.config.errors import DataError

WORDS = 13
BLOCK = 1 << 19
"""Bytes of text that are hashed at once."""
_NO_WORD = re.compile(r"[\W_]+")
_SPACE = 0x20
_BASE = np.uint64(0x9E3779B97F4A7C15)  # any odd number: it must have an inverse modulo 2^64
_BASE_BACK = np.uint64(pow(0x9E3779B97F4A7C15, -1, 1 << 64))


@dataclass(frozen=True)
class Overlap:
    """The runs of the evaluation sets."""

    hashes: NDArray[np.uint64]
    """Sorted, each once."""
    proofs: NDArray[np.uint64]
    """[runs, 2]: the 128-bit hash of each."""

    def touches(self, text: str) -> bool:
        """Whether a text holds one of the runs."""
        return len(self.hashes) > 0 and any(map(self._touches, _blocks(normalised(text))))

    def _touches(self, words: bytes) -> bool:
        return any(True for _ in self.matches(words))

    def matches(self, words: bytes) -> Iterator[int]:
        """Which of the runs normalised words hold, by number, each proved."""
        starts, ends, hashes = _runs(words)
        at = np.minimum(self.hashes.searchsorted(hashes), len(self.hashes) - 1)
        for run in np.flatnonzero(self.hashes[at] == hashes).tolist():
            if (_proof(words[starts[run] : ends[run]]) == self.proofs[at[run]]).all():
                yield int(at[run])

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Overlap":
        """Keep the runs of these texts; one shorter than a run has none."""
        hashes: list[NDArray[np.uint64]] = [np.empty(0, np.uint64)]
        proofs: list[NDArray[np.uint64]] = [np.empty((0, 2), np.uint64)]
        for words in (block for text in texts for block in _blocks(normalised(text))):
            starts, ends, found = _runs(words)
            hashes.append(found)
            pairs = zip(starts.tolist(), ends.tolist(), strict=True)
            proof = [_proof(words[start:end]) for start, end in pairs]
            proofs.append(np.array(proof, np.uint64).reshape(-1, 2))
        sorted_, first = np.unique(np.concatenate(hashes), return_index=True)
        return cls(sorted_, np.concatenate(proofs)[first])

    @property
    def digest(self) -> str:
        """What it is made of, for a plan."""
        return hashlib.sha256(self.proofs.tobytes()).hexdigest()

    def save(self, path: Path) -> None:
        """Write it where workers load it from."""
        with open(path, "wb") as file:
            np.save(file, np.column_stack([self.hashes, self.proofs]))

    @classmethod
    def load(cls, path: Path) -> "Overlap":
        """Read what `save` wrote; three words a run."""
        columns: NDArray[np.uint64] = np.load(path, allow_pickle=False)
        return cls(np.ascontiguousarray(columns[:, 0]), np.ascontiguousarray(columns[:, 1:]))


@dataclass(frozen=True)
class Owned:
    """The runs of many numbered texts, to ask which of them another text repeats."""

    overlap: Overlap
    firsts: NDArray[np.int64]
    """[runs + 1]: where in `owners` those of each run begin."""
    owners: NDArray[np.int64]
    """Numbers of the texts that hold a run; one run may be in many."""

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Owned":
        """Number texts in the order they come."""
        kept = list(texts)
        overlap = Overlap.of(kept)
        pairs = [np.empty((0, 2), np.int64)]
        for number, text in enumerate(kept):
            for words in _blocks(normalised(text)):
                runs = np.unique(overlap.hashes.searchsorted(_runs(words)[2]))
                pairs.append(np.column_stack([runs, np.full(len(runs), number)]))
        owned = np.unique(np.concatenate(pairs), axis=0)
        firsts = owned[:, 0].searchsorted(np.arange(len(overlap.hashes) + 1))
        return cls(overlap, firsts, owned[:, 1])

    def repeated(self, text: str) -> set[int]:
        """Numbers of the texts that share a run with this one."""
        found: set[int] = set()
        if not len(self.overlap.hashes):
            return found
        for words in _blocks(normalised(text)):
            for run in self.overlap.matches(words):
                found.update(self.owners[self.firsts[run] : self.firsts[run + 1]].tolist())
        return found


def normalised(text: str) -> bytes:
    """Lower-case words with one blank between them, as UTF-8."""
    return _NO_WORD.sub(" ", text.lower()).strip().encode("utf-8", "replace")


def _blocks(words: bytes) -> Iterator[bytes]:
    """A long text in blocks that overlap by a run less one word, so that memory stays small."""
    start = 0
    while len(words) - start > BLOCK:
        end = words.find(b" ", start + BLOCK)
        if end < 0:
            break
        yield words[start:end]
        for _ in range(WORDS - 1):
            end = words.rfind(b" ", start, end)
        start = end + 1
    yield words[start:]


def _runs(
    words: bytes,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64]]:
    """Start, end and hash of every run of WORDS words.

    With H(i) the sum of byte(k) * b^k over k < i, a run's hash is (H(end) - H(start)) * b^-start,
    modulo 2^64.
    """
    data = np.frombuffer(words, np.uint8)
    blanks = np.flatnonzero(data == _SPACE)
    starts = np.concatenate([[0], blanks + 1])
    ends = np.concatenate([blanks, [len(data)]])
    if len(starts) < WORDS or not len(data):
        return starts[:0], ends[:0], np.empty(0, np.uint64)
    starts, ends = starts[: len(starts) - WORDS + 1], ends[WORDS - 1 :]
    powers, back = _powers(len(data))
    summed = np.concatenate([[np.uint64(0)], np.cumsum(data * powers, dtype=np.uint64)])
    return starts, ends, (summed[ends] - summed[starts]) * back[starts]


_known: list[NDArray[np.uint64]] = [np.ones(1, np.uint64), np.ones(1, np.uint64)]


def _powers(count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The first powers of the base and of its inverse, kept from call to call."""
    if len(_known[0]) < count:
        for number, base in enumerate((_BASE, _BASE_BACK)):
            factors = np.full(max(count, 1 << 16), base, np.uint64)
            factors[0] = 1
            _known[number] = np.cumprod(factors, dtype=np.uint64)
    return _known[0][:count], _known[1][:count]


def _proof(run: bytes) -> NDArray[np.uint64]:
    digest = hashlib.blake2b(run, digest_size=16).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


def evaluation_texts(paths: Iterable[str]) -> Iterator[str]:
    """What the rows of evaluation files say: all their strings, questions and choices alike.

    Files and folders of any format that a source may have; the columns need no known names.
    """
    from foundling.data.readers.file_formats import DAMAGE, TABLES, form_of, reason_of
    from foundling.data.readers.file_formats import LocalFile as File
    from foundling.data.readers.files import records

    for path in (file for name in paths for file in _files(Path(name))):
        form = form_of(path.name)
        if form is None:
            continue
        file = File(path.name, str(path))
        try:
            rows = _table(path) if form.format in TABLES else (r for _, r in records(file, form))
            for row in rows:
                yield " ".join(_strings(row))
        except DAMAGE as error:
            raise DataError(
                f"{path} cannot be read as an evaluation set ({reason_of(error)})."
            ) from None


def _files(path: Path) -> list[Path]:
    from foundling.data.readers.file_formats import form_of

    if path.is_dir():
        found = [file for file in sorted(path.rglob("*")) if file.is_file() and form_of(file.name)]
    else:
        found = [path] if path.is_file() and form_of(path.name) else []
    if not found:
        raise DataError(
            f"{path} holds no evaluation set: give text, JSON, CSV, Parquet or Arrow files, or a"
            " folder of them."
        )
    return found


def _table(path: Path) -> Iterator[object]:
    import pyarrow.dataset as ds

    format = "parquet" if path.suffix == ".parquet" else "ipc"
    for batch in ds.dataset(path, format=format).to_batches(batch_size=1024):
        yield from batch.to_pylist()


def _strings(value: object) -> Iterator[str]:
    """Every string inside a value, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)
