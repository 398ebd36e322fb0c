"""The byte-level alphabet: which byte each character of a vocabulary stands for.

GPT-2's convention, which every byte-level vocabulary has kept: a printable Latin-1 byte stands for
itself; the others take the code points from 256 upwards in order of their value, so that no token
contains white space.
"""

import re


def _byte_table() -> dict[str, int]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    table.update({chr(256 + place): byte for place, byte in enumerate(shifted)})
    return table


BYTE_OF = _byte_table()
_BYTES = str.maketrans({character: chr(byte) for character, byte in BYTE_OF.items()})
_CHARACTERS = str.maketrans({chr(byte): character for character, byte in BYTE_OF.items()})


def token_bytes(token: str) -> bytes | None:
    """The bytes behind a token of a vocabulary; None if it is not written in the alphabet."""
    if not BYTE_OF.keys() >= set(token):
        return None
    return token.translate(_BYTES).encode("latin-1")


def token_text(raw: bytes) -> str:
    """How a vocabulary writes these bytes."""
    return raw.decode("latin-1").translate(_CHARACTERS)


def byte_width(token: str) -> int:
    """Bytes of text that a token stands for, in this alphabet or in SentencePiece's."""
    raw = token_bytes(token)
    if raw is not None:
        return len(raw)
    return 1 if re.fullmatch("<0x[0-9A-F]{2}>", token) else len(token.replace("▁", " ").encode())


def shown(token: str) -> str:
    """A token on one line: spaces as dots, control characters and broken UTF-8 escaped."""
    raw = token_bytes(token)
    if raw is None:  # not a byte-level vocabulary: show what it stores
        return token
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in raw)
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character == " ":
        return "·"
    return character if character.isprintable() else repr(character)[1:-1]
