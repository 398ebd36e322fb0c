"""Training of byte-level BPE: learn a vocabulary, add tokens, measure bytes per token."""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import tokenizers
from rich.table import Table
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from foundling.config.errors import DataError
from foundling.runtime.console import warn
from foundling.tokenizer.chat import SPECIALS
from foundling.tokenizer.tokenizer import Tokenizer
from foundling.tokenizer.vocabulary_files import MOST_TOKENS

# How well a tokenizer fits a text: what `tokenizer inspect` prints.
#
# Bytes per token says how much text a step of training reads, and tokens per word (fertility) how
# much finer than words the cut is; both depend on the text, so tokenizers are compared on the same
# one. A large share of single-byte tokens means that the vocabulary does not know the language. A
# text that does not survive the round trip cannot be trained on as it is.

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


Measures = dict[str, dict[str, Measure]]
"""By source, then by tokenizer."""


def measure_sources(
    tokenizers: Mapping[str, Tokenizer], texts: Mapping[str, Sequence[str]]
) -> Measures:
    """What each tokenizer makes of the texts of each source, and of all if there are several."""
    found = {
        source: {name: measure(tokenizer, held) for name, tokenizer in tokenizers.items()}
        for source, held in texts.items()
    }
    if len(found) > 1:
        found["all sources"] = {
            name: reduce(add, [by_name[name] for by_name in found.values()]) for name in tokenizers
        }
    return found


def measures_table(found: Measures, tokenizers: Mapping[str, Tokenizer]) -> Table:
    """Measures as a table, ready to print."""
    table = Table(box=None, pad_edge=False)
    for column in ("source", "tokenizer"):
        table.add_column(column, overflow="fold")
    for column in ("vocabulary", "bytes/token", "tokens/word", "1-byte", "round trip", "MB/s"):
        table.add_column(column, justify="right")
    for source, by_name in found.items():
        for number, (name, one) in enumerate(by_name.items()):
            table.add_row(
                source if number == 0 else "",
                name,
                f"{tokenizers[name].vocab_size:,}",
                f"{one.bytes_per_token:.3f}",
                f"{one.fertility:.3f}",
                f"{one.single_share:.1%}",
                "exact" if not one.changed else f"{one.changed:,} of {one.texts:,} changed",
                f"{one.mb_per_s:.1f}",
                end_section=number == len(by_name) - 1,
            )
    return table


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


# Train a byte-level BPE vocabulary.
#
# Words are split much as GPT-2 splits them, but every digit is a token of its own and never carries
# a space: a number then looks the same wherever it stands, and arithmetic has places to line up.
# Special tokens are appended after the vocabulary and are unknown to the merges, so no text can
# reach them.

BYTES = 256
SMALLEST_VOCAB = BYTES + len(SPECIALS)

WORDS = "|".join(
    (
        r"['’](?:ll|re|ve|[dmst])(?!\p{L})",  # clitics: it's, we'll
        r" ?\p{L}+",  # a word with the space before it
        r"\p{N}",  # one digit
        r" ?[^\s\p{L}\p{N}]+",  # punctuation
        r"\s+(?!\S)",  # white space, but for the last blank before a word
        r"\s+",
    )
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn merges until the vocabulary has `vocab_size` tokens, special ones included.

    The same texts give the same tokenizer. A text too small for that many merges gives a smaller
    vocabulary and a warning.
    """
    if vocab_size < SMALLEST_VOCAB:
        raise DataError(
            f"a vocabulary of {vocab_size} is too small; give at least {SMALLEST_VOCAB}"
            f" ({BYTES} bytes and {len(SPECIALS)} special tokens)."
        )
    if vocab_size > MOST_TOKENS:
        raise DataError(
            f"a vocabulary of {vocab_size:,} is too large; give at most {MOST_TOKENS:,}."
        )
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIALS),
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    engine.train_from_iterator(texts, trainer=trainer)
    tokenizer = Tokenizer(engine)
    if tokenizer.vocab_size < vocab_size:
        warn(
            f"the text has no more than {tokenizer.vocab_size} tokens to learn where {vocab_size}"
            " were asked for; the vocabulary is that much smaller."
        )
    return tokenizer
