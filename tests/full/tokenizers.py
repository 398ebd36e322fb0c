"""The fast encoder against the slow one: all of the shared corpus, and a minute of random text."""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from foundling.data.open_source import training_texts
from foundling.tokenizer.bpe_trainer import one_thread, train_tokenizer
from foundling.tokenizer.tokenizer import Tokenizer

SHARED = Path(__file__).parents[3] / "shared" / "data"
SHARP = (
    *(" ", "  ", "\t", "\n", "\r\n", "\x0b", "\x85", "\xa0", "\u1680", "\u2028", "\u3000", "'s"),
    *("'S", "'LL", "’ve", "'ſ", "'", "é", "e\u0301", "İ", "ſ", "\u212a", "ß", "1", "½", "٤", "東"),
    *("ก", "\u200d", "\ufeff", "_", "-", "=", "/", "<|end|>", "\U0001f600", "\U00011de3", "\x1c"),
)
RANDOM_SECONDS = 60
FASTER = 3.4
"""How many times as fast the encoder must be for all the care that is taken."""


def tokenizers() -> dict[str, Any]:
    """GPT-2's, Llama 3's and a vocabulary of our own: every id equal, and how fast."""
    corpus = sorted((SHARED / "corpus").glob("*.parquet"))
    assert corpus, f"{SHARED} holds no corpus"
    own = train_tokenizer(training_texts([str(corpus[0])], max_bytes=20_000_000), 32_768)
    known = {name: Tokenizer.load(SHARED / "tokenizers" / name) for name in ("gpt2", "llama3")}
    figures = {
        name: _compared(tokenizer, corpus) for name, tokenizer in {**known, "own": own}.items()
    }
    for name, got in figures.items():
        assert got["fast MB/s"] >= FASTER * got["slow MB/s"], f"{name}: {got}"
    return figures


def _compared(tokenizer: Tokenizer, corpus: list[Path]) -> dict[str, Any]:
    assert tokenizer.fast, tokenizer.why_slow
    size = texts = tokens = 0
    fast = slow = 0.0
    for batch in _batches(corpus):
        with one_thread():
            began = time.thread_time()
            found = tokenizer.encode_arrays(batch)
            middle = time.thread_time()
            expected = tokenizer._encode(batch)
            fast, slow = fast + middle - began, slow + time.thread_time() - middle
        assert [ids.tolist() for ids in found] == expected
        size += sum(len(text.encode()) for text in batch)
        texts, tokens = texts + len(batch), tokens + sum(map(len, expected))
    return {
        "texts": texts,
        "bytes": size,
        "tokens": tokens,
        "random texts": _random(tokenizer, RANDOM_SECONDS / 3),
        "fast MB/s": round(size / 1e6 / fast, 2),
        "slow MB/s": round(size / 1e6 / slow, 2),
    }


def _batches(corpus: list[Path]) -> Iterator[list[str]]:
    for path in corpus:
        for batch in pq.ParquetFile(path).iter_batches(500, columns=["text"]):
            yield batch.column("text").to_pylist()


def _random(tokenizer: Tokenizer, seconds: float) -> int:
    """How many random texts were compared in that time."""
    draw = random.Random(1)
    compared = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        texts = ["".join(_piece(draw) for _ in range(draw.randrange(1, 40))) for _ in range(50)]
        found = [ids.tolist() for ids in tokenizer.encode_arrays(texts)]
        for text, fast, slow in zip(texts, found, tokenizer._encode(texts), strict=True):
            assert fast == slow, f"{text!r} is encoded differently"
        compared += len(texts)
    return compared


def _piece(draw: random.Random) -> str:
    kind = draw.random()
    if kind < 0.4:
        return draw.choice(SHARP)
    if kind < 0.6:
        return chr(draw.choice((draw.randrange(1, 0xD800), draw.randrange(0xE000, 0x20000))))
    if kind < 0.7:
        return draw.choice(SHARP) * draw.randrange(1, 300)
    return " "[: draw.randrange(2)] + "".join(
        draw.choices("etaoinshrdluEA'", k=draw.randrange(1, 200 if kind > 0.95 else 8))
    )
