"""Small tokenizers of every form that the fast encoder knows, and some that it does not."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from foundling.tokenizer.bpe_trainer import WORDS
from foundling.tokenizer.fast_encode import GPT2_WORDS, QWEN2_WORDS
from foundling.tokenizer.tokenizer import Tokenizer
from foundling.tokenizer.vocabulary_files import LLAMA3_WORDS

SHARED = Path(__file__).parents[4] / "shared" / "data"
TEXT = [
    "Ada lives by the mill and keeps two goats; it's 1204 steps to the well, isn't it? We'll see.",
    "Bram’s bread costs 3 pennies, we'll buy 12 loaves on the 7th.  THEY'VE SAID SO\r\n\r\n",
    "The baker said: <|end|> is only ink.\n\n  Indented line, naïve café, 東京 ٤٢ ½ ²x.",
    "    for i in range(10):\n\tprint(i)  # ---- =====\n\n\n" * 3,
] * 8

# What patterns trip over: blanks of many kinds, clitics, marks, digits of other scripts, folds.
SHARP = [
    *(" ", "  ", "\t", "\n", "\r\n", "\x0b", "\x85", "\xa0", "\u1680", "\u2028", "\u3000"),
    *("'s", "'S", "'LL", "’ve", "'ſ", "'", "a", "B", "é", "e\u0301", "İ", "ſ", "K", "ß", "ŉ", "ǰ"),
    *("1", "12", "½", "²", "٤", "Ⅷ", "〇", "東", "ก", "\u200d", "\ufeff", "_", "-", "=", "/"),
    *("goat", " mill", "<|end|>", "\U0001f600", "\U00011de3", "\U00016ff4", "\U000323b0", "\x1c"),
]

SPLITS = {
    "own": WORDS,
    "gpt2 as a split": GPT2_WORDS,
    "llama3": LLAMA3_WORDS,
    "qwen2": QWEN2_WORDS,
}
FORMS = [*SPLITS, "gpt2", "digits", "digit runs", "nfc", "plain added"]


def byte_level(use_regex: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def cutter(form: str) -> Any:
    """The pre-tokenizer of a form."""
    if form in SPLITS:
        split = pre_tokenizers.Split(Regex(SPLITS[form]), behavior="isolated")
        return pre_tokenizers.Sequence([split, byte_level(False)])
    if form.startswith("digit"):
        digits = pre_tokenizers.Digits(individual_digits=form == "digits")
        return pre_tokenizers.Sequence([digits, byte_level(True)])
    return byte_level(True)


def trained(pre_tokenizer: Any, size: int = 420, **model: Any) -> tokenizers.Tokenizer:
    """An engine that learned from TEXT."""
    engine = tokenizers.Tokenizer(models.BPE(**model))
    engine.pre_tokenizer = pre_tokenizer
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    engine.train_from_iterator(TEXT, trainer=trainer)
    return engine


@cache
def sample(form: str) -> Tokenizer:
    """The tokenizer of a form."""
    engine = trained(cutter(form))
    if form == "nfc":
        engine.normalizer = normalizers.NFC()
    if form == "plain added":
        engine.add_tokens(["goat", " mill"])
    return Tokenizer(engine)


def edited(engine: tokenizers.Tokenizer, **changes: Any) -> Tokenizer:
    """The engine with other values in the model of its tokenizer.json."""
    content = json.loads(engine.to_str())
    content["model"].update(changes)
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)))
