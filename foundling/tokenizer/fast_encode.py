"""Encoding with tiktoken, where it is known to give what tokenizer.json gives.

tiktoken is several times as fast as `tokenizers` and knows nothing of tokenizer.json. It is used
where the splitting pattern is one of a few that both libraries read alike, and where both give the
same ids for fixed texts, for the vocabulary's own tokens and for some texts of every part of a
build. Its ranks are not the vocabulary's ids; a table turns one into the other.

Some texts are declined one by one and left to `tokenizers`: those that hold an added token which is
not special (it is cut out before anything else), and those on which tiktoken's engine runs out of
stack (a run of a million blanks). tiktoken drops what lies between the matches of a pattern; those
that are known match every character.

Rejected: a proof for any pattern and any list of merges (a translator between two dialects of
regular expressions, six hundred lines for patterns that are not in use).
"""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

import numpy as np
import tiktoken
import tokenizers
from numpy.typing import NDArray

from foundling.config.errors import DataError
from foundling.tokenizer.bpe_trainer import WORDS
from foundling.tokenizer.vocabulary_files import LLAMA3_WORDS, token_bytes

Ids = NDArray[np.uint32]

NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
MOST_ADDED = 64
"""Added tokens that each text is searched for; more would cost more than they save."""

# Every byte that UTF-8 can hold.
_BYTES = [*range(0xC0), *range(0xC2, 0xF5)]
_NO_SPECIAL = {"\U0010ffff\U0010fffe": 1 << 24}
"""tiktoken searches for special tokens even where none is allowed, and without one it does so
character by character (half the speed); this one is noncharacters, and stays text if met."""

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What ByteLevel(use_regex=True) splits by."""
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")

# What Digits takes for a digit: of a later Unicode than \p{N} in either library.
_DIGIT = r"\p{N}\x{11DE0}-\x{11DE9}\x{16FF4}-\x{16FF6}"
_BLANKS = r"|\s+(?!\S)|\s+"
_ALIKE = {
    GPT2_WORDS: GPT2_WORDS.removesuffix(_BLANKS),
    LLAMA3_WORDS: LLAMA3_WORDS.removesuffix(_BLANKS),
    QWEN2_WORDS: QWEN2_WORDS.removesuffix(_BLANKS),
    WORDS: r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+",
}
"""Patterns that both libraries read alike, each with its alternatives without lookahead: tiktoken
searches for these at once if they are one group, and else for each by itself."""

OWN_TOKENS = 20_000
"""How many of the vocabulary's tokens are compared at least; each of them once, if it has more."""
RUN_TOGETHER = 16
"""Tokens in a text, without a break, so that their ends could merge."""
CHECKED_CHARS = 2000
"""How much of a text is compared in the middle of a build."""

SAMPLES = (
    "The miller's dog isn't here; we'll see it at 12:05, they've"
    " said. I'd go, you're late, I'm the 1st",
    "DON'T SHOUT, IT'S LATE\tand\t\ttabs  two   three \n\n  indented\r\n\r\n x \xa0 y\u3000z",
    "naïve café ’tis 3½ ٤٢ 東京と नमस्ते \U0001f468\u200d\U0001f469\u200d\U0001f467"
    " e\u0301\u0301 İſ\u212a",
    "x = {'a': [1,2,3]}  # !!! ???---===  https://example.org/~a_b?c=d&e=%20f <|end|><|bos|></s>",
    "a" * 500 + "ab" * 160,
    " " * 300 + "." * 300 + "\n" * 300 + "中" * 200 + "0" * 301 + " ",
    "a\U00011de3\U00011de4 b \U00016ff4\U00016ff5 1\U00011de0 ½½",
)
"""Texts compared at every start."""


class SlowEncodingError(Exception):
    """Why tiktoken is not used; the text completes "tokenizers, because"."""


class FastEncoder:
    """A tokenizer.json with tiktoken inside."""

    def __init__(self, engine: tokenizers.Tokenizer) -> None:
        """Make the engine's equal and compare the two; a SlowEncodingError says why there is
        none."""
        self.versions = versions()
        content = json.loads(engine.to_str())
        self._normalizer = _normalizer(engine, content["normalizer"])
        self._added = _plain_added(content["added_tokens"])
        ids = _ranks(engine, content["model"])
        self._ids = np.array(list(ids.values()), np.uint32)
        pattern = _pattern(content["pre_tokenizer"])
        ranks = {token: rank for rank, token in enumerate(ids)}
        self.encoding = _encoding(pattern, ranks)
        for texts in (SAMPLES, _own_texts(ranks)):
            if (text := self._differing(engine, texts)) is not None:
                raise SlowEncodingError(f"the two encoders differ on {text[:40]!r}")

    def encode(self, texts: Sequence[str]) -> list[Ids | None]:
        """Ids of each text; None where it must be left to `tokenizers`."""
        return [self._encoded(text) for text in texts]

    def _encoded(self, text: str) -> Ids | None:
        try:
            normal = self._normal(text)
            if any(token in text or token in normal for token in self._added):
                return None
            return self._ids.take(self.encoding.encode_to_numpy(normal, disallowed_special=()))
        except (ValueError, TypeError, AttributeError):
            return None  # out of stack, or not a text at all: `tokenizers` will say

    def _normal(self, text: str) -> str:
        if self._normalizer is None or text.isascii():
            return text
        return str(self._normalizer.normalize_str(text))

    def check(self, engine: tokenizers.Tokenizer, texts: Sequence[str]) -> None:
        """Compare the two on the beginnings of some texts; refuse to go on where they differ."""
        some = [text[:CHECKED_CHARS] for text in texts]
        if (text := self._differing(engine, some)) is not None:
            raise DataError(
                f"tiktoken {self.versions['tiktoken']} and tokenizers"
                f" {self.versions['tokenizers']} encode {text[:40]!r} differently; install the"
                " versions that foundling's constraints.txt names and build into an empty folder."
            )

    def _differing(self, engine: tokenizers.Tokenizer, texts: Sequence[str]) -> str | None:
        """The first text that the two encode differently, of those that are not declined."""
        found = zip(texts, self.encode(texts), strict=True)
        taken = [(text, ids) for text, ids in found if ids is not None]
        encodings = engine.encode_batch_fast([text for text, _ in taken], add_special_tokens=False)
        for (text, ids), expected in zip(taken, encodings, strict=True):
            if ids.tolist() != expected.ids:
                return text
        return None


@cache
def versions() -> dict[str, str]:
    """Of both libraries: an encoder that was made with others is not believed."""
    return {name: version(name) for name in ("tiktoken", "tokenizers")}


def _pattern(pre_tokenizer: Mapping[str, Any] | None) -> str:
    """One pattern for tiktoken that cuts as a pre-tokenizer (as tokenizer.json has it) does."""
    steps = _steps(pre_tokenizer)
    last = steps[-1] if steps else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise SlowEncodingError("its pre-tokenizer does not end in ByteLevel without prefix space")
    before, own = steps[:-1], last.get("use_regex", True)
    if [step["type"] for step in before] == ["Digits"] and own:
        # Digits first, then GPT-2's pattern on each stretch between them, which never meets one.
        one = f"[{_DIGIT}]" + ("" if before[0].get("individual_digits") else "+")
        words = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?[^\s\p{{L}}{_DIGIT}]+"
        return rf"(?:{one}|{words})|\s+(?![^\s{_DIGIT}])|\s+"
    pattern = None
    if not before and own:
        pattern = GPT2_WORDS
    elif len(before) == 1 and not own:
        step = before[0]
        if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            pattern = step["pattern"].get("Regex")
    if pattern not in _ALIKE:
        raise SlowEncodingError(
            "its pre-tokenizer is none of those that are known (GPT-2's, Llama 3's, Qwen2's,"
            " foundling's own, and Digits before GPT-2's)"
        )
    return str(pattern).replace(_ALIKE[pattern], f"(?:{_ALIKE[pattern]})")


def _steps(pre_tokenizer: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return []
    if pre_tokenizer["type"] == "Sequence":
        return [step for inner in pre_tokenizer["pretokenizers"] for step in _steps(inner)]
    return [pre_tokenizer]


def _ranks(engine: tokenizers.Tokenizer, model: Mapping[str, Any]) -> dict[bytes, int]:
    """What tiktoken is given, by rank, each with its id: bytes, then what merges make in the order
    of the list, then what is only ever looked up whole.

    `tokenizers` joins the pair that stands first in the list of merges, tiktoken the pair whose
    bytes together have the lowest rank; in this order both choose alike, in vocabularies that a
    training made. tiktoken takes a whole piece for a token before it joins anything. Where the
    vocabulary does not (`ignore_merges`), tokens that its merges do not make are left out.
    """
    if model["type"] != "BPE":
        raise SlowEncodingError(f"its model is {model['type']} and not BPE")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise SlowEncodingError(f"its model has {name} {model[name]!r}")
    texts = {raw: text for text in model["vocab"] if (raw := token_bytes(text))}
    missing = [byte for byte in _BYTES if bytes([byte]) not in texts]
    if missing:
        # With every byte a token, unk_token and byte_fallback have nothing left to do.
        raise SlowEncodingError(f"it has no token for the byte {missing[0]:#04x}")
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    joined = (token_bytes(left + right) for left, right in pairs)
    made = dict.fromkeys(raw for raw in joined if raw)
    tokens = [raw for byte in range(256) if (raw := bytes([byte])) in texts]
    if model.get("ignore_merges"):
        tokens += dict.fromkeys(raw for raw in (*made, *texts) if len(raw) > 1)
    else:
        bpe = engine.model
        tokens += [raw for raw in made if len(bpe.tokenize(texts[raw])) == 1]
    return {token: model["vocab"][texts[token]] for token in tokens}


def _encoding(pattern: str, ranks: dict[bytes, int]) -> tiktoken.Encoding:
    try:
        return tiktoken.Encoding(
            "foundling", pat_str=pattern, mergeable_ranks=ranks, special_tokens=_NO_SPECIAL
        )
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise SlowEncodingError(f"tiktoken refuses its pattern ({reason})") from None


def _own_texts(tokens: Iterable[bytes]) -> list[str]:
    """The vocabulary's tokens of more than a byte in an order of chance, run together."""
    longer = [token for token in tokens if len(token) > 1]
    if not longer:
        return []
    drawn = longer * -(-OWN_TOKENS // len(longer))
    random.Random(0).shuffle(drawn)
    starts = range(0, len(drawn), RUN_TOGETHER)
    # Of characters that the cuts between tokens left in pieces, nothing is compared.
    return [b"".join(drawn[at : at + RUN_TOGETHER]).decode(errors="ignore") for at in starts]


def _normalizer(engine: tokenizers.Tokenizer, content: dict[str, Any] | None) -> Any:
    """The engine's own normalizer, if it leaves ASCII alone; None if it has none."""
    if content is None:
        return None
    if content["type"] not in NORMAL_FORMS:
        raise SlowEncodingError(f"its normalizer is {content['type']}")
    return engine.normalizer


def _plain_added(added: list[dict[str, Any]]) -> tuple[str, ...]:
    """Added tokens that text becomes: those that are not special."""
    plain = tuple(token["content"] for token in added if not token["special"])
    if len(plain) > MOST_ADDED:
        raise SlowEncodingError(f"it has {len(plain)} added tokens that are not special")
    return plain
