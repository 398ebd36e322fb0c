"""The Tokenizer: text and conversations to ids and back, and who it is (the fingerprint).

The work is done by the `tokenizers` library; this class decides what counts as a special token and
sees that text never becomes one. Rejected: calling the library from wherever ids are needed (by
default it turns "<|end|>" inside a user's message into the real token, and each caller would have
to remember the switch).
"""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from foundling.config.errors import DataError
from foundling.runtime.files import write_text_atomic
from foundling.tokenizer.chat import (
    CHAT_TEMPLATE,
    SPECIALS,
    Message,
    Rendered,
    role_and_content,
)

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
# Roles that a foreign tokenizer may fill with a token of its own.
FOREIGN_ROLES = ("bos", "eos", "pad")


class Tokenizer:
    """Byte-level BPE (or any Hugging Face tokenizer) with the chat's special tokens."""

    def __init__(self, engine: tokenizers.Tokenizer, names: dict[str, str] | None = None) -> None:
        """Wrap an engine, appending the special tokens it lacks; `names` maps roles to tokens."""
        self.names = {**SPECIALS, **(names or {})}
        self._engine = _with_specials(engine, list(self.names.values()))
        # Off by default in the library: keep special-token text inside a text as text.
        self._engine.encode_special_tokens = True
        vocabulary = self._engine.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.special_ids: dict[str, int] = {
            role: vocabulary[name] for role, name in self.names.items()
        }
        self.bos_id = self.special_ids["bos"]
        self.eos_id = self.special_ids["eos"]
        self.end_id = self.special_ids["end"]
        self.pad_id = self.special_ids["pad"]
        self.stop_ids = frozenset({self.end_id, self.eos_id})

    # Reading and writing

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Open a folder or tokenizer.json (any Hugging Face one), or vocab.json + merges.txt."""
        path = Path(path)
        folder = path if path.is_dir() else path.parent
        file = folder / TOKENIZER_FILE if path.is_dir() else path
        try:
            if file.is_file():
                return cls(_read_engine(file), _foreign_names(folder / CONFIG_FILE))
            if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
                return cls(_read_gpt2(folder))
        except DataError:
            raise
        except Exception as error:  # the library raises bare Exception for damaged files
            raise DataError(f"{path} cannot be read as a tokenizer ({error}).") from None
        raise DataError(
            f"{path} holds no {TOKENIZER_FILE} and no vocab.json with merges.txt; train one with"
            " `foundling tokenizer train`."
        )

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, each whole or not at all."""
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.names["bos"],
            "eos_token": self.names["eos"],
            "pad_token": self.names["pad"],
            "additional_special_tokens": [
                name for role, name in self.names.items() if role not in FOREIGN_ROLES
            ],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        }
        # The config first: a folder with tokenizer.json is then always complete.
        write_text_atomic(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
        write_text_atomic(folder / TOKENIZER_FILE, self._engine.to_str(pretty=True) + "\n")

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of everything that decides which ids a text or a chat becomes."""
        content = json.loads(self._engine.to_str())
        # Not used by encode(), so not part of who this tokenizer is.
        for key in ("version", "truncation", "padding", "post_processor"):
            content.pop(key, None)
        identity = {"engine": content, "specials": self.names, "template": CHAT_TEMPLATE}
        text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    # Text

    def encode(self, text: str) -> list[int]:
        """Ids of a text; never a special token, whatever the text spells."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts, encoded on all cores.

        TOKENIZERS_PARALLELISM is left alone: unset already means every core, and setting it would
        switch off the library's guard against use after a fork.
        """
        try:
            encodings = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            raise DataError(
                "a text to encode is not valid Unicode text (a lone surrogate or not a string)."
            ) from None
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of ids; special tokens are spelled out unless skipped."""
        return str(self._engine.decode(list(ids), skip_special_tokens=skip_special))

    def piece(self, id: int) -> str:
        """One token on one line: spaces as dots, control characters and broken UTF-8 escaped."""
        token = self._engine.id_to_token(id)
        if token is None:
            return f"<{id}?>"
        if id in self.special_ids.values():
            return str(token)
        try:
            raw = bytes(BYTE_OF[character] for character in token)
        except KeyError:  # not a byte-level vocabulary: show what it stores
            return str(token)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in raw)
        return "".join(map(_visible, text))

    def document(self, text: str) -> list[int]:
        """A document as it is trained on: BOS, text, EOS."""
        return [self.bos_id, *self.encode(text), self.eos_id]

    # Conversations

    def render(self, messages: Sequence[Message]) -> Rendered:
        """A conversation as ids, with a mask over every assistant turn and its end marker."""
        return self.render_batch([messages])[0]

    def render_batch(self, chats: Sequence[Sequence[Message]]) -> list[Rendered]:
        """Many conversations at once, their texts encoded together."""
        parts = [[role_and_content(message) for message in chat] for chat in chats]
        contents = iter(self.encode_batch([text for chat in parts for _, text in chat]))
        rendered = []
        for chat in parts:
            if not chat:
                raise DataError("a conversation has no messages; give it at least one.")
            ids, mask = [self.bos_id], [False]
            for role, _ in chat:
                content = next(contents)
                ids += [self.special_ids[role], *content, self.end_id]
                mask += [False] + [role == "assistant"] * (len(content) + 1)
            rendered.append(Rendered(ids, mask))
        return rendered

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The conversation so far and the opening of the assistant's turn."""
        return [*self.render(messages).ids, self.special_ids["assistant"]]


def _byte_table() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary (GPT-2's convention).

    A printable Latin-1 byte stands for itself; the others take the code points from 256 upwards in
    order of their value, so that no token contains white space.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    table.update({chr(256 + place): byte for place, byte in enumerate(shifted)})
    return table


BYTE_OF = _byte_table()


def _visible(character: str) -> str:
    if character == " ":
        return "·"
    return character if character.isprintable() else repr(character)[1:-1]


def _with_specials(engine: tokenizers.Tokenizer, names: list[str]) -> tokenizers.Tokenizer:
    """Append the special tokens that are missing and see that all of them are marked special."""
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


def _read_engine(file: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))


def _read_gpt2(folder: Path) -> tokenizers.Tokenizer:
    """GPT-2's two files; its own splitting rule is the library's built-in one."""
    bpe = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    engine = tokenizers.Tokenizer(bpe)
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    engine.decoder = decoders.ByteLevel()
    return engine


def _foreign_names(config_file: Path) -> dict[str, str]:
    """BOS, EOS and padding as tokenizer_config.json names them, where it does."""
    if not config_file.is_file():
        return {}
    config: dict[str, Any] = json.loads(config_file.read_text(encoding="utf-8"))
    names = {}
    for role in FOREIGN_ROLES:
        token = config.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            names[role] = token
    return names
