"""How well a tokenizer fits a text: what `tokenizer eval` prints.

Bytes per token says how much text a step of training reads, and tokens per word (fertility) how
much finer than words the cut is; both depend on the text, so tokenizers are compared on the same
one. A large share of single-byte tokens means that the vocabulary does not know the language. A
text that does not survive the round trip cannot be trained on as it is.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from foundling.tokenizer.bpe import Tokenizer

AT_ONCE = 512
"""Texts that are encoded in one call."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What one tokenizer makes of some texts."""

    texts: int
    bytes: int
    words: int
    """Runs of characters that are not white space."""
    tokens: int
    single: int
    """Tokens of one byte."""
    changed: int
    """Texts that decode to something else."""
    seconds: float
    """Time of one core to encode."""

    def __add__(self, other: "Measure") -> "Measure":
        mine, more = asdict(self), asdict(other)
        return Measure(**{name: mine[name] + more[name] for name in mine})

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text in a token, on average."""
        return self.bytes / max(self.tokens, 1)

    @property
    def fertility(self) -> float:
        """Tokens that a word takes, on average."""
        return self.tokens / max(self.words, 1)

    @property
    def single_share(self) -> float:
        """Share of tokens that are one byte."""
        return self.single / max(self.tokens, 1)

    @property
    def mb_per_s(self) -> float:
        """Millions of bytes that one core encodes a second."""
        return self.bytes / 1e6 / max(self.seconds, 1e-9)

    def to_json(self) -> dict[str, Any]:
        """Counts and what follows from them."""
        return {
            **asdict(self),
            "bytes_per_token": self.bytes_per_token,
            "fertility": self.fertility,
            "single_share": self.single_share,
            "mb_per_s": self.mb_per_s,
        }


def measure(tokenizer: Tokenizer, texts: Sequence[str]) -> Measure:
    """Encode texts, decode them again, and count."""
    _ = tokenizer.fast  # making the encoder is not part of the time
    widths = tokenizer.token_widths
    tokens = single = changed = 0
    seconds = 0.0
    for start in range(0, len(texts), AT_ONCE):
        batch = texts[start : start + AT_ONCE]
        with one_thread():
            began = time.thread_time()
            encoded = tokenizer.encode_arrays(batch)
            seconds += time.thread_time() - began
        for text, ids in zip(batch, encoded, strict=True):
            tokens += len(ids)
            single += int(np.count_nonzero(widths[ids] == 1))
            changed += tokenizer.decode(ids.tolist()) != text
    return Measure(
        texts=len(texts),
        bytes=sum(len(text.encode()) for text in texts),
        words=sum(len(text.split()) for text in texts),
        tokens=tokens,
        single=single,
        changed=changed,
        seconds=seconds,
    )


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """`tokenizers` would take every core, which tiktoken does not."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
