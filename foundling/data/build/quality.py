"""Quality filters and removal of near-duplicates, by datatrove, as a stage before the build.

    gopher-quality, gopher-repetition, c4-quality, fineweb-quality      document by document
    minhash                                                             among all documents

The rules and the thresholds are datatrove's own. Its executors are not used: a build brings its own
worker processes, which die with it, and steps are plain generators. What stays is written to a
folder inside `.build` and is the source of the build; the stage is done once, and begins anew if it
is interrupted. Words are cut at white space and punctuation, by the tokenizer below, instead of by
spaCy, so that the same text passes on every machine.
"""

import importlib
import json
import multiprocessing as mp
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from foundling.config.errors import ConfigError, DataError
from foundling.data.build.executor import end_with_parent
from foundling.data.readers.source import FILTERED, Kind, Piece, Row, excerpt, unusable
from foundling.runtime.console import say
from foundling.runtime.files import sha256_file, write_text_atomic

if TYPE_CHECKING:
    from foundling.data.readers.source import Source

RULES = {
    "gopher-quality": "GopherQualityFilter",
    "gopher-repetition": "GopherRepetitionFilter",
    "c4-quality": "C4QualityFilter",
    "fineweb-quality": "FineWebQualityFilter",
}
NEAR_DUPLICATES = "minhash"
MOST_FILES = 64
"""The stage is cut into so many files at most, whatever the number of workers."""


def filtered(
    sources: "Sequence[Source]", names: Sequence[str], folder: Path, workers: int
) -> "list[FilteredSource]":
    """The sources without what the named filters leave out, for a build into `folder`."""
    try:
        importlib.import_module("datatrove.pipeline.filters")
    except ImportError:
        raise ConfigError(
            "filters are datatrove's; install it with `pip install 'foundling[datatrove]'`."
        ) from None
    for source in sources:
        if source.kind == "chat" or source.draws:
            what = "conversations" if source.kind == "chat" else "made by rules"
            raise ConfigError(f"{source.name} is {what}, and filters are for text that was found.")
    work = folder / ".build" / "filtered"
    return [
        FilteredSource(source, tuple(names), work / str(number), workers)
        for number, source in enumerate(sources)
    ]


@dataclass(frozen=True)
class FilteredSource:
    """A source that goes through the stage when it is first read."""

    source: "Source"
    filters: tuple[str, ...]
    folder: Path
    workers: int
    draws: bool = False

    @property
    def name(self) -> str:
        """The source's own."""
        return self.source.name

    @property
    def kind(self) -> Kind:
        """Text."""
        return self.source.kind

    @property
    def recipe(self) -> dict[str, Any]:
        """The source's own, and what it went through."""
        done = {"names": list(self.filters), "datatrove": version("datatrove")}
        return {**self.source.recipe, "filters": done}

    def pieces(self) -> Iterator["FilteredPiece"]:
        """A file of the stage each."""
        notes = self._stage()
        for number, path in enumerate(sorted(self.folder.glob("*.jsonl"))):
            dropped = notes["dropped"] if number == 0 else 0
            yield FilteredPiece(path.name, str(path), dropped)

    def __iter__(self) -> Iterator[Row]:
        for piece in self.pieces():
            yield from piece.rows()

    def _stage(self) -> dict[str, int]:
        """Do the work, unless it is done."""
        done = self.folder / "done.json"
        if not done.is_file():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            say(f"{self.name}: filtering ({', '.join(self.filters)})")
            pieces = list(self.source.pieces())
            if not pieces:
                raise DataError(f"{self.name} holds nothing to filter.")
            notes = {"dropped": _run(pieces, self.filters, self.folder, self.workers)}
            write_text_atomic(done, json.dumps(notes) + "\n")
        return {"dropped": json.loads(done.read_text())["dropped"]}


@dataclass(frozen=True)
class FilteredPiece:
    """A file of the stage."""

    name: str
    path: str
    dropped: int
    """Rows that the whole stage left out, in its first file."""

    def rows(self, tally: Counter[str] | None = None) -> Iterator[Row]:
        """What stayed, and the rows that were unusable before."""
        if tally is not None and self.dropped:
            tally[FILTERED] += self.dropped
        with open(self.path, encoding="utf-8") as file:
            for line in file:
                yield Row(**json.loads(line))

    def identity(self) -> str:
        """Its checksum."""
        return f"{self.name} {sha256_file(Path(self.path))}"


def _run(pieces: Sequence[Piece], names: Sequence[str], folder: Path, workers: int) -> int:
    """All passes; the number of rows that were left out."""
    files = min(MOST_FILES, len(pieces))
    rules = [name for name in names if name in RULES]
    near = NEAR_DUPLICATES in names
    kept = folder / "rules" if near else folder
    kept.mkdir(exist_ok=True)
    with ProcessPoolExecutor(
        min(workers, files), mp.get_context("spawn"), initializer=_begin, initargs=(folder,)
    ) as pool:
        shares = [
            pieces[len(pieces) * n // files : len(pieces) * (n + 1) // files] for n in range(files)
        ]
        dropped = sum(pool.map(partial(_apply_rules, rules, kept), range(files), shares))
        if near:
            list(pool.map(partial(_sign, folder, files), range(files)))
            buckets = _config().num_buckets
            list(pool.map(partial(_match, folder, buckets), range(buckets)))
            pool.submit(_cluster, folder).result()
            dropped += sum(pool.map(partial(_remove, folder, files), range(files)))
    for scratch in ("rules", "signatures", "matches", "removals"):
        shutil.rmtree(folder / scratch, ignore_errors=True)
    return dropped


def _begin(folder: Path) -> None:
    """In every worker of the stage: end with the parent, and send datatrove's log to a file."""
    end_with_parent()
    log = os.open(folder / "datatrove.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 2)


def _apply_rules(rules: Sequence[str], folder: Path, number: int, pieces: Sequence[Piece]) -> int:
    """Rows of some pieces through the filters, one after another; how many were left out."""
    filters = importlib.import_module("datatrove.pipeline.filters")
    steps = [getattr(filters, RULES[name])(language=_words()) for name in rules]
    rows = (row for piece in pieces for row in piece.rows())
    return _through(rows, folder / f"{number:05d}.jsonl", steps, 0, 1)


def _minhash(name: str, *folders: Path, **options: Any) -> Any:
    """One of datatrove's four steps, from one folder to the next."""
    dedup = importlib.import_module("datatrove.pipeline.dedup")
    return getattr(dedup, f"MinhashDedup{name}")(*map(str, folders), **options)


def _kept_by_rules(folder: Path, number: int) -> Iterator[Row]:
    return FilteredPiece("", str(folder / "rules" / f"{number:05d}.jsonl"), 0).rows()


def _sign(folder: Path, files: int, number: int) -> None:
    step = _minhash("Signature", folder / "signatures", config=_config(), language=_words())
    step.run(_documents(_kept_by_rules(folder, number), lambda row: None), number, files)


def _match(folder: Path, buckets: int, number: int) -> None:
    step = _minhash("Buckets", folder / "signatures", folder / "matches", config=_config())
    step.run(None, number, buckets)


def _cluster(folder: Path) -> None:
    _minhash("Cluster", folder / "matches", folder / "removals", config=_config()).run(None, 0, 1)


def _remove(folder: Path, files: int, number: int) -> int:
    steps = [_minhash("Filter", folder / "removals")]
    path = folder / f"{number:05d}.jsonl"
    return _through(_kept_by_rules(folder, number), path, steps, number, files)


def _through(rows: Iterable[Row], path: Path, steps: Sequence[Any], number: int, files: int) -> int:
    """Write what passes the steps, and unusable rows as they are; how many did not pass."""
    read = kept = 0
    with open(path, "w", encoding="utf-8") as file:

        def counted() -> Iterator[Row]:
            nonlocal read
            for row in rows:
                read += 1
                yield row

        def aside(row: Row) -> None:
            nonlocal kept
            kept += 1
            _write(file, row)

        stream: Any = _documents(counted(), aside)
        for step in steps:
            stream = step.run(stream, number, files)
        for document in stream:
            kept += 1
            _write(file, Row(text=document.text, **document.metadata))
    return read - kept


def _documents(rows: Iterable[Row], aside: Callable[[Row], None]) -> Iterator[Any]:
    """Rows as datatrove's documents; unusable ones are put aside."""
    kind = importlib.import_module("datatrove.data").Document
    for number, row in enumerate(rows):
        reason = unusable(row, chat=False)
        if reason is not None:
            aside(
                Row(
                    text=excerpt(row),
                    source=row.source,
                    where=row.where,
                    problem=reason,
                    lost=row.lost,
                )
            )
            continue
        metadata = {"source": row.source, "where": row.where, "kind": row.kind, "split": row.split}
        yield kind(text=row.text, id=str(number), metadata=metadata)


def _write(file: TextIO, row: Row) -> None:
    names = ("text", "source", "where", "kind", "split", "problem", "lost")
    file.write(json.dumps({name: getattr(row, name) for name in names}) + "\n")


def _config() -> Any:
    """datatrove's own, but for the hash: its default, xxhash, takes no strings since version 4."""
    minhash = importlib.import_module("datatrove.pipeline.dedup.minhash")
    return minhash.MinhashConfig(hash_config=minhash.HashConfig(hash_fc="sha1"))


def _words() -> Any:
    """A word tokenizer for datatrove that needs nothing else to be installed."""
    base: Any = importlib.import_module("datatrove.utils.word_tokenizers").WordTokenizer

    class Words(base):  # type: ignore[misc]
        """Words, numbers and marks; sentences end at a full stop, a mark or a line's end."""

        def word_tokenize(self, text: str) -> list[str]:
            """A word with what an apostrophe ties to it, or one mark."""
            return re.findall(r"\w+(?:['’]\w+)*|[^\w\s]", text)

        def sent_tokenize(self, text: str) -> list[str]:
            """Sentences without the space around them."""
            return [text[start:stop].strip() for start, stop in self.span_tokenize(text)]

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            """Where each sentence begins and ends."""
            found = re.finditer(r"\S[^.!?\n]*[.!?]*[\"'”’)]*", text)
            return [match.span() for match in found]

    return Words()
