"""What tests of the build share: rows, a source that travels to workers, and ways to compare."""

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from foundling.config.data_manifest import Manifest
from foundling.config.errors import DataError
from foundling.data.build.build import build
from foundling.data.dataset import DataSet
from foundling.data.readers.source import Row
from foundling.runtime.files import sha256_file
from foundling.tokenizer.bpe_trainer import train_tokenizer
from foundling.tokenizer.tokenizer import Tokenizer
from foundling.train.faults.heartbeat import process_state

WORDS = ("the", "mill", "baker", "goat", "well", "river", "stone", "bread", "letter", "old")


def text(number: int) -> str:
    """A document that no other number has."""
    rng = random.Random(number)
    return " ".join(rng.choices(WORDS, k=rng.randint(3, 40))) + f" {number}"


def rows(count: int = 400) -> list[Row]:
    """Documents 0, 1, ..."""
    return [Row(text=text(n), source="t", where=str(n), kind=f"k{n % 3}") for n in range(count)]


def learn() -> Tokenizer:
    """A small tokenizer of these documents."""
    return train_tokenizer((text(n) for n in range(200)), 300)


@dataclass(frozen=True)
class NumbersPiece:
    """Documents `start` to `stop`; `trouble` is a number at which something happens."""

    name: str
    start: int
    stop: int
    trouble: tuple[int, str] | None = None

    def identity(self) -> str:
        return f"numbers {self.start} {self.stop}"

    def rows(self, tally: Counter[str] | None = None) -> Iterator[Row]:
        for number in range(self.start, self.stop):
            if self.trouble and number == self.trouble[0]:
                happen(self.trouble[1])
            if tally is not None and number % 50 == 49:
                tally["filtered"] += 1
                continue
            # Every seventh document is one that came before, every fortieth is unusable.
            shown = number // 2 if number % 7 == 6 else number
            content = "" if number % 40 == 39 else text(shown)
            yield Row(text=content, source="numbers", where=f"n:{number}", kind=f"k{number % 3}")


def happen(what: str) -> None:
    """What a piece may do to the process that reads it."""
    if what == "refuse":
        raise DataError("the numbers have run out; get some more.")
    if what == "fail":
        raise ZeroDivisionError("a bug of ours")
    if multiprocessing.parent_process() is None:
        _until_a_child_dies()  # the test itself lives here: a worker process comes by and dies
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def _until_a_child_dies(limit_s: float = 20) -> None:
    seen: set[int] = set()
    last = time.monotonic() + limit_s
    while time.monotonic() < last and not any(process_state(pid) in ("", "Z") for pid in seen):
        for task in Path("/proc/self/task").iterdir():
            seen |= set(map(int, (task / "children").read_text().split()))
        time.sleep(0.05)


@dataclass(frozen=True)
class Numbers:
    """A source of several pieces; without a count it never ends."""

    count: int | None = 600
    piece: int = 100
    first: int = 0
    name: str = "numbers"
    kind: Literal["text", "chat"] = "text"
    draws: bool = False
    trouble: tuple[int, str] | None = None

    @property
    def recipe(self) -> dict[str, Any]:
        return {"source": self.name, "count": self.count, "first": self.first}

    def pieces(self) -> Iterator[NumbersPiece]:
        start = self.first
        end = None if self.count is None else self.first + self.count
        while end is None or start < end:
            stop = start + self.piece if end is None else min(start + self.piece, end)
            yield NumbersPiece(f"{start}..{stop - 1}", start, stop, self.trouble)
            start = stop

    def __iter__(self) -> Iterator[Row]:
        for piece in self.pieces():
            yield from piece.rows()


def make(source: Any, tokenizer: Tokenizer, folder: Path, **options: Any) -> Manifest:
    """Build with small shards; a list of rows gets a name and a recipe."""
    fields: dict[str, Any] = {"shard_tokens": 2000, "val_share": 0.1}
    if not hasattr(source, "pieces") and not (isinstance(source, tuple)):
        fields |= {"name": "t", "kind": "text", "recipe": {"rows": "test"}}
    return build(source, tokenizer, folder, **{**fields, **options})


def files(folder: Path) -> dict[str, str]:
    """Checksum of every file."""
    return {
        str(path.relative_to(folder)): sha256_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".verified.json"  # times of files, which differ
    }


def documents(data: DataSet, tokenizer: Tokenizer) -> list[str]:
    """Every document of a split, as text with its special tokens, in stored order."""
    found = []
    for number in range(len(data.shards)):
        shard = data.shard(number)
        for start, stop in zip(shard.offsets[:-1], shard.offsets[1:], strict=True):
            found.append(tokenizer.decode(shard.tokens[start:stop].tolist()))
    return found
