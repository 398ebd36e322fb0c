"""The Tokenizer: text and conversations to ids and back, and who it is (the fingerprint).

The work is done by the `tokenizers` library, and by tiktoken where that is known to do the same
(fast_encode.py); this class decides what counts as a special token and sees that text never
becomes one.
Rejected: calling the library from wherever ids are needed (by default it turns "<|end|>" inside a
user's message into the real token, and each caller would have to remember the switch).
"""

import hashlib
import json
import multiprocessing
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from foundling.config.errors import DataError
from foundling.runtime.console import warn
from foundling.runtime.files import write_text_atomic
from foundling.tokenizer.chat import (
    CHAT_TEMPLATE,
    SPECIALS,
    Message,
    Rendered,
    is_learned,
    role_and_content,
)
from foundling.tokenizer.vocabulary_files import (
    CONFIG_FILE,
    EXTRA_KEY,
    FOREIGN_ROLES,
    TOKENIZER_FILE,
    byte_width,
    is_panic,
    read_files,
    shown,
    token_bytes,
    unknown_id,
    with_specials,
)

if TYPE_CHECKING:
    from foundling.tokenizer.fast_encode import FastEncoder


class Tokenizer:
    """Byte-level BPE (or any Hugging Face tokenizer) with the chat's special tokens."""

    def __init__(
        self,
        engine: tokenizers.Tokenizer,
        names: dict[str, str] | None = None,
        extras: Iterable[str] = (),
    ) -> None:
        """Wrap an engine, appending the special tokens it lacks; `names` maps roles to tokens and
        `extras` are special tokens without a role."""
        self.names = {**SPECIALS, **(names or {})}
        self.extras = tuple(extras)
        engine = with_specials(engine, [*self.names.values(), *self.extras])
        engine.encode_special_tokens = True  # so that what a text spells stays text
        self._engine = engine
        vocabulary = engine.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.unk_id = unknown_id(engine)
        self.special_ids: dict[str, int] = {
            role: vocabulary[name] for role, name in self.names.items()
        }
        self.extra_ids: dict[str, int] = {token: vocabulary[token] for token in self.extras}
        self.bos_id = self.special_ids["bos"]
        self.eos_id = self.special_ids["eos"]
        self.end_id = self.special_ids["end"]
        self.pad_id = self.special_ids["pad"]
        self.stop_ids = frozenset({self.end_id, self.eos_id})

    # Reading and writing

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Open a folder or file: tokenizer.json (any Hugging Face one), vocab.json + merges.txt, or
        Llama 3's tokenizer.model."""
        return cls(*read_files(Path(path)))

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, each whole or not at all."""
        roles = [name for role, name in self.names.items() if role not in FOREIGN_ROLES]
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.names["bos"],
            "eos_token": self.names["eos"],
            "pad_token": self.names["pad"],
            "additional_special_tokens": [*roles, *self.extras],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        }
        if self.extras:
            config[EXTRA_KEY] = list(self.extras)
        # The config first: a folder with tokenizer.json is then always complete.
        write_text_atomic(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
        write_text_atomic(folder / TOKENIZER_FILE, self._engine.to_str(pretty=True) + "\n")

    def to_json(self) -> str:
        """The vocabulary as tokenizer.json holds it, for other libraries."""
        return str(self._engine.to_str())

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of everything that decides which ids a text or a chat becomes."""
        identity = {"engine": self._content(), "specials": self.names, "template": CHAT_TEMPLATE}
        if self.extras:
            identity["extras"] = self.extras
        text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def _content(self) -> dict[str, Any]:
        """The engine as JSON, without what encode() does not use."""
        content: dict[str, Any] = json.loads(self._engine.to_str())
        for key in ("version", "truncation", "padding", "post_processor"):
            content.pop(key, None)
        return content

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In another process, with what the first one has found out."""
        from foundling.tokenizer.fast_encode import versions

        self.__dict__.update(state)
        self._engine.encode_special_tokens = True
        quick = state.get("_quick", (None, ""))[0]
        if quick is not None and quick.versions != versions():
            del self.__dict__["_quick"]  # made on another machine, where the libraries are others

    # Growing

    def grown(self, tokens: Sequence[str]) -> "Tokenizer":
        """The same tokenizer with more special tokens, whose ids follow all others."""
        known = self._engine.get_vocab(with_added_tokens=True)
        for number, token in enumerate(tokens):
            if token in known or token in tokens[:number]:
                raise DataError(f"the token {token!r} exists already; add tokens that are new.")
            if not token.strip() or not token.isprintable():
                raise DataError(f"{token!r} is no token; give printable text, such as '<|think|>'.")
        engine = tokenizers.Tokenizer.from_str(self._engine.to_str())
        larger = Tokenizer(engine, self.names, (*self.extras, *tokens))
        expected = range(self.vocab_size, self.vocab_size + len(tokens))
        if [larger.extra_ids[token] for token in tokens] != list(expected):
            raise DataError("the tokenizer's ids have gaps at their end; it cannot be extended.")
        return larger

    def grew_from(self, older: "Tokenizer") -> bool:
        """Whether this is `older` with nothing but special tokens appended (or nothing at all)."""
        new, old = self._content(), older._content()
        added, known = new.pop("added_tokens"), old.pop("added_tokens")
        return (
            (new, self.names) == (old, older.names)
            and self.extras[: len(older.extras)] == older.extras
            and [token for token in added if token["id"] < older.vocab_size] == known
        )

    # Text

    @property
    def fast(self) -> bool:
        """Whether texts are encoded by tiktoken; the first question takes a second."""
        return self._quick[0] is not None

    @property
    def why_slow(self) -> str:
        """Why not; empty if they are."""
        return self._quick[1]

    @cached_property
    def _quick(self) -> "tuple[FastEncoder | None, str]":
        from foundling.tokenizer.fast_encode import FastEncoder, SlowEncodingError

        try:
            return FastEncoder(self._engine), ""
        except SlowEncodingError as reason:
            if multiprocessing.parent_process() is None:
                warn(
                    f"texts are encoded by tokenizers, several times slower than by tiktoken:"
                    f" {reason}."
                )
            return None, str(reason)

    def encode(self, text: str) -> list[int]:
        """Ids of a text; never a special token, whatever the text spells."""
        return self.encode_batch([text])[0]

    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Ids of many texts the fast way: by tiktoken on one thread, where that is known to give
        what tokenizer.json gives, else by `tokenizers` with a warning that says why."""
        quick = self._quick[0]
        found = [None] * len(texts) if quick is None else quick.encode(texts)
        left = [number for number, ids in enumerate(found) if ids is None]
        rest = dict(zip(left, self._encode([texts[number] for number in left]), strict=True))
        return [
            np.array(rest[number], np.uint32) if ids is None else ids
            for number, ids in enumerate(found)
        ]

    def encode_documents(
        self, texts: Sequence[str], dtype: type[Any]
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Many texts end to end, each between BOS and EOS, and the length of each."""
        bos, eos = (np.array([id], dtype) for id in (self.bos_id, self.eos_id))
        arrays = self.encode_arrays(texts)
        parts = [part for ids in arrays for part in (bos, ids, eos)]
        tokens = np.concatenate([bos[:0], *parts], dtype=dtype, casting="unsafe")
        return tokens, np.array([len(ids) + 2 for ids in arrays], np.int64)

    def check_encoding(self, texts: Sequence[str]) -> None:
        """Compare both encoders on some of the texts; refuse to go on where they differ."""
        quick = self._quick[0]
        if quick is not None:
            quick.check(self._engine, texts)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts; by tiktoken only if its encoder is there already, which a few
        sentences are not worth."""
        if "_quick" in self.__dict__ and self.fast:
            return [ids.tolist() for ids in self.encode_arrays(texts)]
        return self._encode(texts)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """By `tokenizers`, on all cores.

        TOKENIZERS_PARALLELISM is left alone: unset already means every core, and setting it would
        switch off the library's guard against use after a fork.
        """
        try:
            encodings = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            raise DataError(
                "a text to encode is not valid Unicode text (a lone surrogate or not a string)."
            ) from None
        except BaseException as error:  # of the library: a word without a token, a pattern's end
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            raise DataError(f"the tokenizer cannot encode a text: {error}.") from None
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of ids; special tokens are spelled out unless skipped. Extra ones always are: they
        are part of what an assistant says."""
        if skip_special and self.extras:
            return str(self._engine.decode([i for i in ids if i not in self._silent], False))
        return str(self._engine.decode(list(ids), skip_special_tokens=skip_special))

    @cached_property
    def _silent(self) -> frozenset[int]:
        """Ids of special tokens that are not part of what is said."""
        added = self._engine.get_added_tokens_decoder()
        return frozenset(
            id for id, token in added.items() if token.special and token.content not in self.extras
        )

    def piece(self, id: int) -> str:
        """One token on one line: spaces as dots, control characters and broken UTF-8 escaped."""
        token = self._engine.id_to_token(id)
        if token is None:
            return f"<{id}?>"
        if id in self.special_ids.values() or id in self.extra_ids.values():
            return str(token)
        return shown(token)

    def token_bytes(self, id: int) -> bytes:
        """The bytes of text that one token stands for; a special token's are its name's."""
        token = self._engine.id_to_token(id)
        if token is None:
            return b""
        raw = None if id in self._added_ids else token_bytes(token)
        if raw is None and (code := re.fullmatch("<0x([0-9A-F]{2})>", token)):
            return bytes.fromhex(code[1])
        return raw if raw is not None else token.replace("▁", " ").encode()

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._engine.get_added_tokens_decoder())

    @cached_property
    def token_widths(self) -> NDArray[np.int32]:
        """Bytes of text behind each id; 0 for special tokens and for ids without a token."""
        widths = np.zeros(self.vocab_size, np.int32)
        for token, id in self._engine.get_vocab(with_added_tokens=False).items():
            widths[id] = byte_width(token)
        for id, added in self._engine.get_added_tokens_decoder().items():
            widths[id] = 0 if added.special else len(added.content.encode())
        return widths

    @cached_property
    def adds_bos(self) -> bool:
        """Whether readers of tokenizer.json begin a text with BOS unless told otherwise; `encode`
        never does."""
        return bool(self._engine.encode("a", add_special_tokens=True).ids[:1] == [self.bos_id])

    def document(self, text: str) -> list[int]:
        """A document as it is trained on: BOS, text, EOS."""
        return [self.bos_id, *self.encode(text), self.eos_id]

    # Conversations

    def render(self, messages: Sequence[Message]) -> Rendered:
        """A conversation as ids, with a mask over every assistant turn that is learned and its end
        marker."""
        return self.render_batch([messages])[0]

    def render_batch(self, chats: Sequence[Sequence[Message]]) -> list[Rendered]:
        """Many conversations at once, their texts encoded together."""
        talks = [
            [
                (role, self._parts(role, content), is_learned(message))
                for message in chat
                for role, content in [role_and_content(message)]
            ]
            for chat in chats
        ]
        texts = [p for talk in talks for _, parts, _ in talk for p in parts if isinstance(p, str)]
        encoded = iter(self.encode_batch(texts))
        rendered = []
        for talk in talks:
            if not talk:
                raise DataError("a conversation has no messages; give it at least one.")
            ids, mask = [self.bos_id], [False]
            for role, parts, learned in talk:
                content: list[int] = []
                for part in parts:
                    content += next(encoded) if isinstance(part, str) else [part]
                ids += [self.special_ids[role], *content, self.end_id]
                mask += [False] + [learned] * (len(content) + 1)
            rendered.append(Rendered(ids, mask))
        return rendered

    def _parts(self, role: str, content: str) -> list[str | int]:
        """A message as texts and ids: the extra tokens that an assistant's message spells are the
        real ones; anybody else's are text."""
        if role != "assistant" or not self.extras:
            return [content]
        parts = self._extra_pattern.split(content)
        return [self.extra_ids.get(part, part) for part in parts if part] or [""]

    @cached_property
    def _extra_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.extras, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The conversation so far and the opening of the assistant's turn."""
        return [*self.render(messages).ids, self.special_ids["assistant"]]
