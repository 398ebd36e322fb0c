"""What a build is measured against: the encoder alone, on the same text, in as many processes.

The processes are started as a build starts its own and load the same tokenizer; what they encode is
in their memory before the clock starts, and what comes out is dropped. Two times are taken: of the
encoding, and of the encoding with the start, which a build pays too.
"""

import multiprocessing as mp
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from foundling.config.data_manifest import Manifest
from foundling.data.build.build import build
from foundling.data.build.encode import one_thread
from foundling.data.build.executor import end_with_parent, without_main
from foundling.data.open_source import open_source
from foundling.tokenizer.tokenizer import Tokenizer

BEST_OF = 2
"""The encoder's own interfaces that are tried; the faster one counts."""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Text that went through, and how long it took."""

    text_bytes: int
    tokens: int
    seconds: float
    """From the moment that every process is ready (of a build: in all)."""
    start_s: float
    """Until the last process was ready (of a build: 0, it is in the seconds)."""

    @property
    def mib_per_s(self) -> float:
        """Of UTF-8 text."""
        return self.text_bytes / self.seconds / 2**20

    @property
    def mib_per_s_with_start(self) -> float:
        """The start counted."""
        return self.text_bytes / (self.seconds + self.start_s) / 2**20


def encoder_alone(specs: Sequence[str], tokenizer: Tokenizer, workers: int) -> Rate:
    """Encode all text of some sources by nothing but tiktoken, in `workers` processes."""
    assert tokenizer.fast, tokenizer.why_slow
    context = mp.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    for number in range(workers):
        ours, theirs = context.Pipe()
        words = (theirs, tuple(specs), number, workers)
        processes.append(context.Process(target=_encode_share, args=words, daemon=True))
        pipes.append(ours)
    began = time.monotonic()
    for process in processes:
        with without_main():  # as a build does
            process.start()
    for pipe in pipes:
        pipe.send(tokenizer)
    ready = [pipe.recv() for pipe in pipes]
    found = []
    for way in range(BEST_OF):
        clock = time.perf_counter()
        for pipe in pipes:
            pipe.send(way)
        done = [pipe.recv() for pipe in pipes]
        found.append((time.perf_counter() - clock, done))
    for process in processes:
        process.join()
    seconds, done = min(found)
    return Rate(
        text_bytes=sum(size for size, _ in done),
        tokens=sum(tokens for _, tokens in done),
        seconds=seconds,
        start_s=max(ready) - began,
    )


def _encode_share(pipe: Connection, specs: Sequence[str], number: int, workers: int) -> None:
    """One process: every so many-th text, by one of the encoder's interfaces after another."""
    end_with_parent()
    one_thread()
    tokenizer: Tokenizer = pipe.recv()
    quick = tokenizer._quick[0]
    assert quick is not None
    encoding = quick.encoding
    ready = time.monotonic()
    rows = (row for spec in specs for row in open_source(spec))
    texts = [row.text for n, row in enumerate(rows) if n % workers == number and row.text]
    size = sum(len(text.encode()) for text in texts)
    pipe.send(ready)
    for _ in range(BEST_OF):
        tokens = 0
        if pipe.recv() == 0:
            for text in texts:  # as a build calls it
                tokens += len(encoding.encode_to_numpy(text, disallowed_special=()))
        else:
            for text in texts:
                tokens += len(encoding.encode_ordinary(text))
        pipe.send((size, tokens))


def whole_build(specs: Sequence[str], tokenizer: Tokenizer, folder: Path, workers: int) -> Rate:
    """Build a data set of the same sources with everything that is on by default."""
    sources = [open_source(spec) for spec in specs]
    clock = time.perf_counter()
    manifest = build(sources, tokenizer, folder, workers=workers)
    seconds = time.perf_counter() - clock
    return rate_of(manifest, seconds)


def rate_of(manifest: Manifest, seconds: float) -> Rate:
    """What a build that took so long has put through."""
    shards = (*manifest.train, *manifest.val)
    return Rate(
        text_bytes=sum(shard.text_bytes for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        seconds=seconds,
        start_s=0.0,
    )
