"""Where rows come from: the built-in village, or files.

    hamlet            documents of the village, with the floor of each
    hamlet:chat       conversations of its villagers
    PATH              .txt (documents separated by blank lines), .jsonl or .parquet with a `text` or
                      a `messages` column, or a folder of such files

A source is an iterable of rows that can be read again from the start and gives the same rows; its
recipe says what it was, so that a restarted build knows whether it is the same one.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, Protocol

from foundling.config.errors import DataError
from foundling.data.rows import Row
from foundling.runtime.files import sha256_file

SUFFIXES = (".txt", ".jsonl", ".parquet")


class Source(Protocol):
    """Rows with a name and a recipe."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> Literal["text", "chat"]: ...

    @property
    def recipe(self) -> dict[str, Any]: ...

    def __iter__(self) -> Iterator[Row]: ...


def open_source(
    spec: str, *, seed: int = 1, documents: int | None = None, val_share: float = 0.02
) -> Source:
    """Rows of what `spec` names.

    `seed` is the village's, `documents` limits the rows for training (None: no limit; the village
    never ends by itself), and `val_share` is how much of the village is written for val besides;
    files leave that to the build.
    """
    if spec in ("hamlet", "hamlet:chat"):
        return HamletSource(spec == "hamlet:chat", seed, documents, val_share)
    path = Path(spec)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    elif path.is_file() and path.suffix in SUFFIXES:
        files = [path]
    else:
        files = []
    if not files:
        raise DataError(
            f"{spec} is no source: give hamlet, hamlet:chat, or a file or folder of"
            f" {', '.join(SUFFIXES)}."
        )
    return FileSource(path.name, tuple(files), documents)


@dataclass(frozen=True)
class HamletSource:
    """The village's own writing; val comes from its own stream, a little after every few rows."""

    chat: bool
    seed: int
    documents: int | None
    val_share: float

    @property
    def name(self) -> str:
        return "hamlet:chat" if self.chat else "hamlet"

    @property
    def kind(self) -> Literal["text", "chat"]:
        return "chat" if self.chat else "text"

    @property
    def recipe(self) -> dict[str, Any]:
        return {
            "source": self.name,
            "seed": self.seed,
            "documents": self.documents,
            "val_share": self.val_share,
        }

    def __iter__(self) -> Iterator[Row]:
        from foundling.hamlet import Village

        village = Village(self.seed)
        written = 0
        for index in count() if self.documents is None else range(self.documents):
            yield self._row(village, index, "train")
            # Spread evenly, so that a build that stops at a token count has its share of val.
            while written < (index + 1) * self.val_share:
                yield self._row(village, written, "val")
                written += 1

    def _row(self, village: Any, index: int, split: str) -> Row:
        from foundling.hamlet import conversation, document

        where = f"{split}:{index}"
        if self.chat:
            talk = conversation(village, self.seed, index, split)
            return Row(
                messages=talk.messages, source=self.name, where=where, kind=talk.kind, split=split
            )
        page = document(village, self.seed, index, split)
        return Row(
            text=page.text,
            source=self.name,
            where=where,
            kind=page.kind,
            floor_bits=page.bits,
            split=split,
        )


@dataclass(frozen=True)
class FileSource:
    """Text or conversations from files, in order of their names."""

    name: str
    files: tuple[Path, ...]
    documents: int | None

    @property
    def kind(self) -> Literal["text", "chat"]:
        """chat if the first readable row has messages."""
        for row in self:
            if row.problem is None:
                return "text" if row.messages is None else "chat"
        return "text"

    @property
    def recipe(self) -> dict[str, Any]:
        # Names and checksums but no folders: the same files elsewhere are the same source.
        files = {str(number): [f.name, sha256_file(f)] for number, f in enumerate(self.files)}
        return {"source": self.name, "files": files, "documents": self.documents}

    def __iter__(self) -> Iterator[Row]:
        readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
        rows = (row for file in self.files for row in readers[file.suffix](file))
        for number, (where, value) in enumerate(rows):
            if self.documents is not None and number >= self.documents:
                return
            yield _row(value, self.name, where)


def _row(value: object, source: str, where: str) -> Row:
    """A row from what a file held; anything unexpected is left for quarantine."""
    if isinstance(value, str):
        return Row(text=value, source=source, where=where)
    if isinstance(value, dict):
        if value.get("messages") is not None:
            return Row(messages=value["messages"], source=source, where=where, kind="chat")
        if "text" in value:
            return Row(text=value["text"], source=source, where=where)
    return Row(source=source, where=where, problem="neither text nor messages")


def _read_txt(file: Path) -> Iterator[tuple[str, object]]:
    lines: list[str] = []
    start = 1
    with open(file, encoding="utf-8", errors="surrogateescape") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                start = start if lines else number
                lines.append(line)
            elif lines:
                yield f"{file.name}:{start}", "".join(lines).rstrip("\n")
                lines = []
    if lines:
        yield f"{file.name}:{start}", "".join(lines).rstrip("\n")


def _read_jsonl(file: Path) -> Iterator[tuple[str, object]]:
    # surrogateescape: a byte that is no UTF-8 becomes a lone surrogate, which quarantine names.
    with open(file, encoding="utf-8", errors="surrogateescape") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                yield f"{file.name}:{number}", json.loads(line)
            except (ValueError, RecursionError):
                yield f"{file.name}:{number}", None


def _read_parquet(file: Path) -> Iterator[tuple[str, object]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        table = pq.ParquetFile(file)
        names = [name for name in ("text", "messages") if name in table.schema_arrow.names]
        if not names:
            raise DataError(f"{file} has neither a `text` nor a `messages` column; add one.")
        for batch in table.iter_batches(batch_size=1024, columns=names):
            for value in batch.to_pylist():
                yield f"{file.name}:{number}", value
                number += 1
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{file} cannot be read as Parquet ({reason}).") from None
