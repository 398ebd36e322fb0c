"""Train a byte-level BPE vocabulary.

Words are split much as GPT-2 splits them, but every digit is a token of its own and never carries a
space: a number then looks the same wherever it stands, and arithmetic has places to line up.
Special tokens are appended after the vocabulary and are unknown to the merges, so no text can
reach them.
"""

from collections.abc import Iterable

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from foundling.config.errors import DataError
from foundling.runtime.log import warn
from foundling.tokenizer.bpe import Tokenizer
from foundling.tokenizer.chat import SPECIALS
from foundling.tokenizer.reading import MOST_TOKENS

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
