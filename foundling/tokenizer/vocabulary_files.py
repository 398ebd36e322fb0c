"""Vocabulary files read as one engine: tokenizer.json, GPT-2's pair, Llama 3's ranks."""

import base64
import binascii
import json
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from foundling.config.errors import DataError

# tokenizer.json                any Hugging Face tokenizer; tokenizer_config.json names its tokens
# vocab.json + merges.txt       GPT-2's
# tokenizer.model               Llama 3's tiktoken ranks: a token in base64 and its rank a line
#
# Ranks say which tokens there are and not which pairs make them. Each token's pair is the one that
# tiktoken joins last, so a list of those merges encodes as tiktoken does.

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
RANKS_FILE = "tokenizer.model"
EXTRA_KEY = "foundling_extra_tokens"
# Roles that a foreign tokenizer may fill with a token of its own.
FOREIGN_ROLES = ("bos", "eos", "pad")

MOST_TOKENS = 1 << 22
"""More than any vocabulary has; tables over all ids must fit into memory."""

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_RANKS = 128_000
NO_TOKEN = 1 << 32
LLAMA3_NAMES = {"bos": "<|begin_of_text|>", "eos": "<|end_of_text|>"}


class Files(NamedTuple):
    """What a tokenizer's files hold."""

    engine: tokenizers.Tokenizer
    names: dict[str, str]
    """Tokens that fill a role (bos, eos, pad)."""
    extras: tuple[str, ...] = ()
    """Special tokens that were added by `tokenizer add`."""


def read_files(path: Path) -> Files:
    """The tokenizer in a folder or file; anything that is none is refused with a sentence."""
    if path.is_file() and path.suffix not in (".json", ".model", ""):
        raise DataError(f"{path} is no tokenizer file; give the folder with its {TOKENIZER_FILE}.")
    folder = path if path.is_dir() else path.parent
    file = folder / TOKENIZER_FILE if path.is_dir() else path
    ranks = path if path.suffix == ".model" else folder / RANKS_FILE
    try:
        if file.is_file() and file != ranks:
            config = _config(folder / CONFIG_FILE)
            engine = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
            return Files(engine, _names(config), tuple(config.get(EXTRA_KEY, ())))
        if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            return Files(_read_gpt2(folder), {})
        if ranks.is_file():
            return Files(_read_llama3(ranks), dict(LLAMA3_NAMES))
    except DataError:
        raise
    except BaseException as error:  # the library raises bare Exception for damaged files
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise DataError(f"{path} cannot be read as a tokenizer ({error}).") from None
    raise DataError(
        f"{path} holds no {TOKENIZER_FILE}, no vocab.json with merges.txt and no {RANKS_FILE};"
        " train one with `foundling tokenizer train`, or name one of the hub:"
        " hf://openai-community/gpt2."
    )


def is_panic(error: BaseException) -> bool:
    """Whether the library gave up inside: a pattern that backtracks too often, an index that was
    not expected. Of such, Python knows no Exception."""
    return type(error).__name__ == "PanicException"


def unknown_id(engine: tokenizers.Tokenizer) -> int | None:
    """The id of what stands for text without a token, in tokenizers that have such a one."""
    if isinstance(engine.model, models.Unigram):  # the library does not say by which attribute
        found: int | None = json.loads(engine.to_str())["model"]["unk_id"]
        return found
    name = getattr(engine.model, "unk_token", None)
    return None if name is None else engine.token_to_id(name)


def llama3_specials() -> list[str]:
    """The 256 special tokens of Llama 3, in the order of their ids."""
    reserved = [f"<|reserved_special_token_{number}|>" for number in range(251)]
    return [
        *("<|begin_of_text|>", "<|end_of_text|>", *reserved[:4]),
        *("<|start_header_id|>", "<|end_header_id|>", reserved[4], "<|eot_id|>"),
        *reserved[5:],
    ]


def _read_gpt2(folder: Path) -> tokenizers.Tokenizer:
    """GPT-2's two files; its own splitting rule is the library's built-in one."""
    bpe = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    engine = tokenizers.Tokenizer(bpe)
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    engine.decoder = decoders.ByteLevel()
    return engine


def _read_llama3(file: Path) -> tokenizers.Tokenizer:
    """Ranks as a tokenizer.json would have them, and the special tokens after them."""
    ranks = _read_ranks(file)
    if len(ranks) != LLAMA3_RANKS:
        raise DataError(
            f"{file} has {len(ranks):,} ranks, and the pattern is known only for the"
            f" {LLAMA3_RANKS:,} of Llama 3; give the {TOKENIZER_FILE} of that tokenizer."
        )
    pairs = [last_pair(token, ranks) for token in ranks if len(token) > 1]
    engine = tokenizers.Tokenizer(
        models.BPE(
            vocab={token_text(token): rank for token, rank in ranks.items()},
            merges=[(token_text(pair[0]), token_text(pair[1])) for pair in pairs if pair],
            ignore_merges=True,
        )
    )
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    engine.decoder = decoders.ByteLevel()
    specials = [AddedToken(name, special=True, normalized=False) for name in llama3_specials()]
    engine.add_special_tokens(specials)
    return engine


def _read_ranks(file: Path) -> dict[bytes, int]:
    """Tokens with their ranks, from rank 0 without a gap."""
    ranks: dict[bytes, int] = {}
    try:
        for number, line in enumerate(file.read_bytes().split(b"\n")):
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
                if int(rank) != number:
                    raise ValueError
    except (ValueError, binascii.Error):
        raise DataError(
            f"{file} is no list of tiktoken ranks from 0 (line {number + 1}); of a SentencePiece"
            f" model, give the {TOKENIZER_FILE}."
        ) from None
    return ranks


def last_pair(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """What tiktoken joins last when it makes a token from its bytes; None if it gets stuck."""
    parts = [token[place : place + 1] for place in range(len(token))]
    while len(parts) > 2:
        found = [ranks.get(left + right, NO_TOKEN) for left, right in pairwise(parts)]
        best = min(found)
        if best == NO_TOKEN:
            return None
        at = found.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return config


def _names(config: dict[str, Any]) -> dict[str, str]:
    """BOS, EOS and padding as tokenizer_config.json names them, where it does."""
    names = {}
    for role in FOREIGN_ROLES:
        token = config.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            names[role] = token
    if "bos" not in names and "eos" in names:
        # GPT-2 and Qwen begin a document with the token that ended the one before.
        names["bos"] = names["eos"]
    return names


def with_specials(engine: tokenizers.Tokenizer, names: list[str]) -> tokenizers.Tokenizer:
    """Append the special tokens that are missing and see that all of them are marked special."""
    ids = engine.get_vocab(with_added_tokens=True).values()
    if (largest := max(ids, default=0)) >= MOST_TOKENS:  # the library would count up to it
        raise DataError(
            f"the tokenizer has {len(ids):,} tokens and ids up to {largest:,}; ids must be below"
            f" {MOST_TOKENS:,}."
        )
    engine.no_truncation()
    engine.no_padding()
    content = json.loads(engine.to_str())
    plain = [t for t in content["added_tokens"] if t["content"] in names and not t["special"]]
    if plain:
        # The library ignores a second add_special_tokens of a token it knows as an ordinary one.
        for token in plain:
            token["special"] = True
        engine = tokenizers.Tokenizer.from_str(json.dumps(content))
    engine.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    ids = engine.get_vocab(with_added_tokens=True).values()
    if len(set(ids)) != len(ids):
        raise DataError("the tokenizer gives one id to two tokens; it cannot be extended.")
    return engine


# The byte-level alphabet: which byte each character of a vocabulary stands for.
#
# GPT-2's convention, which every byte-level vocabulary has kept: a printable Latin-1 byte stands
# for itself; the others take the code points from 256 upwards in order of their value, so that no
# token contains white space.


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
