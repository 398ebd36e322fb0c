"""Cheap text in any amount, built in a child process whose whole tree is weighed as it works.

Words are long and each is one token, so that encoding costs little; documents are slices of one
long text with a number in front, so that none is a duplicate.
"""

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from foundling.data.build.build import build
from foundling.data.readers.source import Row
from foundling.tokenizer.bpe_trainer import train_tokenizer
from foundling.tokenizer.tokenizer import Tokenizer

WORD_LETTERS = 30
DOCUMENT_CHARS = 4000
PIECE_DOCUMENTS = 1000


@cache
def long_text() -> str:
    """A million characters of long words."""
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefgh", k=WORD_LETTERS)) for _ in range(40)]
    return " ".join(rng.choices(words, k=1_000_000 // (WORD_LETTERS + 1)))


def cheap_tokenizer() -> Tokenizer:
    """Every word a token."""
    return train_tokenizer([long_text()[:200_000]], 900)


@dataclass(frozen=True)
class CheapPiece:
    """Documents `start` to `stop`."""

    name: str
    start: int
    stop: int

    def identity(self) -> str:
        return self.name

    def rows(self, tally: Counter[str] | None = None) -> Iterator[Row]:
        text = long_text()
        room = len(text) - DOCUMENT_CHARS
        for number in range(self.start, self.stop):
            at = number * 7919 % room
            yield Row(text=f"{number} {text[at : at + DOCUMENT_CHARS]}", where=str(number))


@dataclass(frozen=True)
class Cheap:
    """`megabytes` of text."""

    megabytes: int
    name: str = "cheap"
    kind: Literal["text", "chat"] = "text"
    draws: bool = False

    @property
    def recipe(self) -> dict[str, Any]:
        return {"cheap": self.megabytes}

    def pieces(self) -> Iterator[CheapPiece]:
        documents = self.megabytes * 1_000_000 // DOCUMENT_CHARS
        for start in range(0, documents, PIECE_DOCUMENTS):
            stop = min(start + PIECE_DOCUMENTS, documents)
            yield CheapPiece(f"{start}..{stop}", start, stop)

    def __iter__(self) -> Iterator[Row]:
        for piece in self.pieces():
            yield from piece.rows()


def weigh(megabytes: int, folder: Path, shard_tokens: int, workers: int = 2) -> dict[str, float]:
    """Build so much in a child; MB of memory that its process tree held at most, and seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    order = {
        "megabytes": megabytes,
        "folder": str(folder),
        "shard_tokens": shard_tokens,
        "workers": workers,
    }
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    code = f"import build_memory; build_memory.main({order!r})"
    child = subprocess.Popen([sys.executable, "-c", code], env=environment)
    most = 0.0
    while child.poll() is None:
        most = max(most, sum(map(_resident, _tree(child.pid))) / 1e6)
        time.sleep(0.01)
    assert child.returncode == 0
    return {"peak_mb": most, "seconds": time.monotonic() - began}


def _tree(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for parent in found:
        try:
            words = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        except OSError:
            continue
        found += map(int, words)
    return found


def _resident(pid: int) -> int:
    """Bytes of a process in memory, mapped files included."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def main(order: dict[str, Any]) -> None:
    """What the child does."""
    folder = Path(order["folder"])
    tokenizer = Tokenizer.load(folder / "tokenizer")
    build(
        Cheap(order["megabytes"]),
        tokenizer,
        folder / str(order["megabytes"]),
        shard_tokens=order["shard_tokens"],
        workers=order["workers"],
    )
