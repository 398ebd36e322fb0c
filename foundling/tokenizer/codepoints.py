"""Which code points one atom of a regular expression matches, in each of the two engines.

Asked of the engines themselves, over all of Unicode: their tables come from different versions of
the standard, and no release note says which. `tokenizers` cuts with Oniguruma, tiktoken with Rust's
regex.
"""

from functools import cache

import numpy as np
import tiktoken
from numpy.typing import NDArray
from tokenizers import Regex, normalizers, pre_tokenizers

from foundling.tokenizer.unproved import UnprovedError

SIZE = 0x110000
NO_SPECIAL = {"\U0010ffff\U0010fffe": 1 << 24}
"""tiktoken searches for special tokens even where none is allowed, and without one it does so
character by character (half the speed); this one is noncharacters, and stays text if met."""

Codes = NDArray[np.bool_]
"""True at each code point that belongs."""


@cache
def everything() -> str:
    """Every code point that a text can hold, in order."""
    return "".join(chr(code) for code in range(SIZE) if not 0xD800 <= code < 0xE000)


@cache
def in_tokenizers(atom: str) -> Codes:
    """What Oniguruma matches."""
    try:
        rest = normalizers.Replace(Regex(f"(?:{atom})+"), "").normalize_str(everything())
    except Exception as error:  # the library has no class of its own for a bad pattern
        raise UnprovedError(f"its pattern has {atom}, which tokenizers refuses ({error})") from None
    return marked(everything()) & ~marked(rest)


@cache
def in_tiktoken(atom: str) -> Codes:
    """What Rust's regex matches."""
    encoding = encoding_of(f"(?:{atom})+", {bytes([byte]): byte for byte in range(256)}, atom)
    found = encoding.encode_to_numpy(everything(), disallowed_special=())
    return marked(found.astype(np.uint8).tobytes().decode())


@cache
def rust_numeric() -> Codes:
    """What the pre-tokenizer Digits takes for a digit, which asks neither engine."""
    pieces = pre_tokenizers.Digits(individual_digits=True).pre_tokenize_str(everything())
    # A digit is a piece of its own; what lies between two digits is one too.
    short = marked("".join(piece for piece, _ in pieces if len(piece) == 1))
    doubled = "".join(chr(code) * 2 for code in np.flatnonzero(short))
    again = pre_tokenizers.Digits(individual_digits=True).pre_tokenize_str(doubled)
    return marked("".join(piece for piece, _ in again if len(piece) == 1))


def encoding_of(pattern: str, ranks: dict[bytes, int], shown: str = "") -> tiktoken.Encoding:
    """A tiktoken encoding, or the reason why its engine refuses the pattern."""
    try:
        return tiktoken.Encoding(
            "foundling", pat_str=pattern, mergeable_ranks=ranks, special_tokens=NO_SPECIAL
        )
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise UnprovedError(
            f"its pattern has {shown or pattern}, which tiktoken refuses ({reason})"
        ) from None


def marked(text: str) -> Codes:
    """The code points of a text."""
    codes = np.zeros(SIZE, np.bool_)
    codes[np.frombuffer(text.encode("utf-32-le"), np.uint32)] = True
    return codes


def written(codes: Codes) -> str:
    """A set of code points as a class that Rust's regex reads."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], codes, [False]]).astype(np.int8)))
    ranges = zip(edges[::2].tolist(), (edges[1::2] - 1).tolist(), strict=True)
    return "[" + "".join(f"\\x{{{low:X}}}-\\x{{{high:X}}}" for low, high in ranges) + "]"
