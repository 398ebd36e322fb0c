"""500 ways to damage a file, each the same on every run: what is damaged, how, and where.

Source files are small and of every format; the built set is two shards with everything beside them.
A case names its target, the damage and a seed, so that a failure can be looked at alone.
"""

import gzip
import json
import random
import subprocess
import sys
from bz2 import compress as bz2_compress
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from lzma import compress as xz_compress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROWS = 60
CHATS = 30
CHILD = Path(__file__).with_name("damage_child.py")


def texts() -> list[str]:
    """Documents of one line each, so that every format holds the same ones."""
    chance = random.Random(7)
    words = ["the", "river", "met", "a", "mill", "nine", "geese", "slept", "é", "漢字", "noon"]
    return [
        f"{number}: " + " ".join(chance.choices(words, k=chance.randrange(3, 60)))
        for number in range(ROWS)
    ]


def chats() -> list[list[dict[str, str]]]:
    """Conversations of two turns."""
    return [
        [{"role": "user", "content": f"ask {text}"}, {"role": "assistant", "content": text}]
        for text in texts()[:CHATS]
    ]


def _arrow(table: pa.Table) -> bytes:
    sink = BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _parquet(table: pa.Table, **options: object) -> bytes:
    sink = BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def _zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def source_files() -> dict[str, bytes]:
    """Whole files by name."""
    table = pa.table({"text": texts()})
    talks = pa.table({"messages": chats()})
    jsonl = "".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts()).encode()
    txt = "\n\n".join(texts()).encode() + b"\n"
    quoted = [t.replace('"', '""') for t in texts()]
    csv = ("text\n" + "".join(f'"{t}"\n' for t in quoted)).encode()
    return {
        "pages.txt": txt,
        "pages.jsonl": jsonl,
        "pages.json": json.dumps([{"text": t} for t in texts()]).encode(),
        "pages.csv": csv,
        "pages.tsv": csv,
        "pages.parquet": _parquet(table),
        "plain.parquet": _parquet(table, compression="none", use_dictionary=False),
        "pages.arrow": _arrow(table),
        "pages.jsonl.gz": gzip.compress(jsonl, mtime=0),
        "pages.jsonl.zst": _zstd(jsonl),
        "pages.jsonl.xz": xz_compress(jsonl),
        "pages.jsonl.bz2": bz2_compress(jsonl),
        "pages.txt.gz": gzip.compress(txt, mtime=0),
        "chats.jsonl": "".join(json.dumps({"messages": c}) + "\n" for c in chats()).encode(),
        "chats.parquet": _parquet(talks),
    }


Hurt = Callable[[bytes, random.Random], bytes]


def _flip(content: bytes, chance: random.Random) -> bytes:
    broken = bytearray(content)
    broken[chance.randrange(len(broken))] ^= 1 << chance.randrange(8)
    return bytes(broken)


def _scatter(content: bytes, chance: random.Random) -> bytes:
    broken = bytearray(content)
    for _ in range(chance.randrange(2, 40)):
        broken[chance.randrange(len(broken))] = chance.randrange(256)
    return bytes(broken)


def _cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(1, len(content))]


def _zeros(content: bytes, chance: random.Random) -> bytes:
    """As a disk leaves it that ran full, or a copy that skipped a block."""
    start = chance.randrange(len(content))
    size = min(chance.randrange(8, 600), len(content) - start)
    return content[:start] + bytes(size) + content[start + size :]


def _lost(content: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(content) - 1)
    return content[:start] + content[start + chance.randrange(1, 300) :]


def _end_scatter(content: bytes, chance: random.Random) -> bytes:
    """Where Parquet and Arrow say what they hold."""
    tail = min(len(content), 700)
    return content[:-tail] + _scatter(content[-tail:], chance)


def _other_type(content: bytes, chance: random.Random) -> bytes:
    """Under this name, another kind of file."""
    return chance.choice(
        (
            b"\x89PNG\r\n\x1a\n" + chance.randbytes(300),
            b"<!DOCTYPE html><p>404</p>\n",
            b"\x00" * 400,
        )
    )


DAMAGES: dict[str, Hurt] = {
    "flip": _flip,
    "scatter": _scatter,
    "end scatter": _end_scatter,
    "cut": _cut,
    "half": lambda content, _: content[: len(content) // 2],
    "last byte lost": lambda content, _: content[:-1],
    "zeros": _zeros,
    "lost": _lost,
    "other type": _other_type,
    "random": lambda content, chance: chance.randbytes(len(content)),
    "garbage after": lambda content, chance: content + chance.randbytes(64),
    "empty": lambda content, _: b"",
}

BUILT = (
    "train/shard-00000.arrow",
    "val/shard-00000.arrow",
    "manifest.json",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
    "PLAN",
    "NOTE",
)
"""Files of a built set; PLAN and NOTE are the caches beside it, whatever they are called."""


@dataclass(frozen=True)
class Case:
    """One damaged file."""

    target: str
    damage: str
    seed: int

    @property
    def name(self) -> str:
        """As a failure shows it."""
        return f"{self.target} / {self.damage} / {self.seed}"

    def hurt(self, content: bytes) -> bytes:
        """The damaged bytes; never the same as before."""
        for attempt in range(20):
            chance = random.Random(f"{self.name}/{attempt}")
            broken = DAMAGES[self.damage](content, chance)
            if broken != content:
                return broken
        raise AssertionError(f"{self.name} damages nothing")


def wrong_names() -> Iterator[Case]:
    """Whole files under the name of another format."""
    names = list(source_files())
    for seed, name in enumerate(names):
        yield Case(f"{name} AS {names[(seed + 5) % len(names)]}", "renamed", seed)


FIXED = ("half", "last byte lost", "empty")
"""The same whatever the seed."""
ALL = 500


def cases() -> list[Case]:
    """All 500, in a fixed order."""
    found = list(wrong_names())
    names = list(source_files())
    for seed in range(3):
        for damage in DAMAGES:
            if seed and damage in FIXED:
                continue
            found += [Case(name, damage, seed) for name in (*BUILT, *names)]
    return found[:ALL]


def judged(home: Path, names: list[str], child: Path = CHILD) -> dict[str, str]:
    """The outcome of each case; a child that dies is begun again after the case that ended it."""
    outcomes: dict[str, str] = {}
    left = list(names)
    while left:
        done = subprocess.run(
            [sys.executable, str(child), str(home)],
            input=json.dumps(left),
            capture_output=True,
            text=True,
        )
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        for line in lines:
            if "end" in line:
                outcomes[line["end"]] = line.get("outcome") or f"FAILED {line['failed']}"
        if done.returncode == 0:
            break
        if not lines:
            raise AssertionError(done.stderr[-2000:])
        last = lines[-1].get("begin") or lines[-1]["end"]
        outcomes.setdefault(last, f"FAILED: the process ended with {done.returncode}")
        left = left[left.index(last) + 1 :]
    return outcomes


def failures(outcomes: dict[str, str]) -> dict[str, str]:
    """What must not happen."""
    return {name: outcome for name, outcome in outcomes.items() if outcome.startswith("FAILED")}
