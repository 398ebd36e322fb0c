"""How a tokenizer.json cuts a text into pieces, as one pattern for tiktoken; proved, then probed.

Three forms of pre-tokenizer can be written as one pattern:

    ByteLevel with its own pattern                          GPT-2
    Split by a pattern, then ByteLevel without one          Llama 3, Qwen, foundling's own
    Digits, then ByteLevel with its own pattern             StarCoder, SmolLM

The proof is in pattern.py: equal parts, put together alike. The probe is a check on the proof and
on the engines: every text of up to three characters, one from each class of code points that the
pattern can tell apart, and thousands of longer ones, must be cut alike.
"""

import itertools
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from foundling.tokenizer.codepoints import (
    SIZE,
    encoding_of,
    in_tokenizers,
    rust_numeric,
    written,
)
from foundling.tokenizer.pattern import GPT2, Translation
from foundling.tokenizer.unproved import UnprovedError

LONGER_TEXTS = 4000
LONGEST = 9


def pattern_of(pre_tokenizer: Mapping[str, Any] | None) -> str:
    """Prove that one pattern cuts as a pre-tokenizer (as tokenizer.json has it) does."""
    translation = Translation(_source(pre_tokenizer))
    _probe(pre_tokenizer, translation)
    return translation.text


def _source(pre_tokenizer: Mapping[str, Any] | None) -> str:
    """The pattern that a pre-tokenizer amounts to."""
    steps = _steps(pre_tokenizer)
    last = steps[-1] if steps else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise UnprovedError("its pre-tokenizer does not end in ByteLevel without a prefix space")
    own = last.get("use_regex", True)
    before = steps[:-1]
    if not before and own:
        return GPT2
    if len(before) == 1 and not own and before[0]["type"] == "Split":
        return _split(before[0])
    if len(before) == 1 and own and before[0]["type"] == "Digits":
        return _digits(alone=bool(before[0].get("individual_digits")))
    names = ", ".join(step["type"] for step in steps)
    raise UnprovedError(f"its pre-tokenizer ({names}) is none that can be written as one pattern")


def _steps(pre_tokenizer: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return []
    if pre_tokenizer["type"] == "Sequence":
        return [step for inner in pre_tokenizer["pretokenizers"] for step in _steps(inner)]
    return [pre_tokenizer]


def _split(step: Mapping[str, Any]) -> str:
    pattern = step["pattern"].get("Regex")
    if step["behavior"] != "Isolated" or step["invert"] or pattern is None:
        raise UnprovedError("its Split does not keep the matches of a pattern as pieces")
    return str(pattern)


def _digits(alone: bool) -> str:
    """Digits cut off first, then GPT-2's pattern on each stretch between them.

    That pattern then never meets a digit, nor looks past one. What counts as a digit is asked of
    Digits itself: it follows another version of Unicode than \\p{N}.
    """
    digits = rust_numeric()
    if (in_tokenizers(r"\p{N}") & ~digits).any() or (in_tokenizers(r"[\p{L}\s]") & digits).any():
        raise UnprovedError(
            "its pre-tokenizer Digits takes other characters for digits than its pattern"
        )
    one = written(digits)
    rest = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?[^\s\p{{L}}{one[1:-1]}]+"
    return rf"{one}{'' if alone else '+'}|{rest}|\s+(?![^\s{one[1:-1]}])|\s+"


def _probe(pre_tokenizer: Mapping[str, Any] | None, translation: Translation) -> None:
    """Cut texts both ways and compare the pieces."""
    texts = list(probe_texts(representatives(translation)))
    # With every stretch of a text a token, tiktoken's tokens are its pieces.
    stretches = {
        text[start:stop].encode()
        for text in texts
        for start, stop in itertools.combinations(range(len(text) + 1), 2)
    }
    stretches |= {bytes([byte]) for byte in range(256)}
    ranks = {stretch: rank for rank, stretch in enumerate(sorted(stretches))}
    ours = encoding_of(translation.text, ranks)
    theirs = _cutter(pre_tokenizer)
    for text in texts:
        spans = [span for _, span in theirs.pre_tokenize_str(text)]
        expected = [text[start:stop].encode() for start, stop in spans]
        found = ours.decode_tokens_bytes(ours.encode_ordinary(text))
        if found != expected and b"".join(found) == text.encode():
            raise UnprovedError(f"the two engines cut {text!r} differently")


def _cutter(pre_tokenizer: Mapping[str, Any] | None) -> Any:
    empty = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    engine = tokenizers.Tokenizer.from_str(json.dumps({**empty, "pre_tokenizer": pre_tokenizer}))
    return engine.pre_tokenizer


def representatives(translation: Translation) -> list[str]:
    """One code point of every class that the pattern tells apart."""
    draw = random.Random(0)
    kinds: NDArray[np.uint64] = np.zeros(SIZE, np.uint64)
    for codes in translation.atoms.values():
        kinds ^= np.where(codes, np.uint64(draw.getrandbits(64)), np.uint64(0))
    kinds[0xD800:0xE000] = kinds[0]  # surrogates are in no text
    return [chr(place) for place in np.unique(kinds, return_index=True)[1].tolist()]


def probe_texts(alphabet: list[str]) -> Iterator[str]:
    """Every text of up to three characters and some longer ones; the same for the same alphabet."""
    for length in (1, 2, 3):
        yield from map("".join, itertools.product(alphabet, repeat=length))
    draw = random.Random(0)
    for _ in range(LONGER_TEXTS):
        yield "".join(draw.choices(alphabet, k=draw.randint(4, LONGEST)))
