"""Encoding with tiktoken, where it is proved to give what tokenizer.json gives.

tiktoken is several times as fast as `tokenizers` and knows nothing of tokenizer.json. The proof has
two halves: it cuts a text into the same pieces (cuts.py) and joins the bytes of a piece into the
same tokens (merges.py). Its ranks are not the vocabulary's ids; a table turns one into the other.

Some texts are declined one by one and left to `tokenizers`: those that hold an added token which is
not special (it is cut out before anything else), those of which bytes went missing (text between
the matches of a pattern, which tiktoken drops), and those on which its engine runs out of stack (a
run of a million blanks).
"""

import json
import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import tiktoken
import tokenizers
from numpy.typing import NDArray

from foundling.tokenizer.codepoints import encoding_of
from foundling.tokenizer.cuts import pattern_of
from foundling.tokenizer.merges import Merges
from foundling.tokenizer.proofs import proved, versions
from foundling.tokenizer.unproved import UnprovedError

Ids = NDArray[np.uint32]
Lengths = NDArray[np.int64]

OLDEST = (0, 14)
"""Earlier ones were not tried; some take a time that grows with the square of a run's length."""
NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
MOST_ADDED = 64
"""Added tokens that each text is searched for; more would cost more than they save."""

_NOTHING: set[str] = set()

SAMPLES = (
    "The miller's dog isn't here; we'll see it at 12:05, they've"
    " said. I'd go, you're late, I'm the 1st",
    "DON'T SHOUT, IT'S LATE\tand\t\ttabs  two   three \n\n  indented\r\n\r\n x \xa0 y\u3000z",
    "naïve café ’tis 3½ ٤٢ 東京と नमस्ते \U0001f468\u200d\U0001f469\u200d\U0001f467"
    " e\u0301\u0301 İſ\u212a",
    "x = {'a': [1,2,3]}  # !!! ???---===  https://example.org/~a_b?c=d&e=%20f <|end|><|bos|></s>",
    "a" * 500 + "ab" * 160,
    " " * 300 + "." * 300 + "\n" * 300 + "中" * 200 + "0" * 301 + " ",
)
"""Compared at every start: a kept proof is not believed without them."""


@dataclass(frozen=True)
class Proof:
    """What tiktoken needs besides tokenizer.json to encode as it does."""

    pattern: str
    lost: list[int]
    """Ids of tokens that no text becomes."""
    versions: dict[str, str]
    """What it was made with."""


class FastEncoder:
    """A tokenizer.json with tiktoken inside."""

    def __init__(self, engine: tokenizers.Tokenizer, fingerprint: str, proof: Proof | None) -> None:
        """Prove the engine's equal, or take a proof that another process has made; an UnprovedError
        says why there is none."""
        if tuple(map(int, re.findall(r"\d+", version("tiktoken"))[:2])) < OLDEST:
            raise UnprovedError("tiktoken is older than {}.{}".format(*OLDEST))
        content = json.loads(engine.to_str())
        self._normalizer = _normalizer(engine, content["normalizer"])
        self._added = _plain_added(content["added_tokens"])
        merges = Merges.of(content["model"])
        # One that comes from another machine is good only where the libraries are the same.
        good = proof is not None and proof.versions == versions()
        self.proof = proof if proof and good else _prove(content, merges, fingerprint)
        ranks = merges.ranked(self.proof.lost)
        self.encoding: tiktoken.Encoding = encoding_of(self.proof.pattern, ranks.ranks)
        self._ids = ranks.ids
        # Two ranks past all others stand for the tokens around a document; they have no bytes.
        widths = np.append(ranks.widths, [0, 0])
        self._widths = widths.astype(np.min_scalar_type(widths.max()))
        self._around = np.array([len(ranks.ids), len(ranks.ids) + 1], np.uint32)
        self._asked: tuple[int, int, type[Any]] | None = None
        self._answer: NDArray[Any] = self._ids
        self._compare(engine)

    def documents(
        self,
        texts: Sequence[str],
        bos: int,
        eos: int,
        dtype: type[Any],
        stated: int | None = None,
    ) -> tuple[NDArray[Any], Lengths] | None:
        """Ids of some texts end to end, each between `bos` and `eos`, and how many each has; None
        if any of them must be left to `tokenizers`. The quickest way there is: one array for
        all. `stated` is how many UTF-8 bytes they are together, where that is known."""
        if self._normalizer is not None:
            texts, stated = [self._normal(text) for text in texts], None
        if any(token in text for token in self._added for text in texts):
            return None
        # What encode_to_numpy does, without its questions about special tokens.
        encode = self.encoding._core_bpe.encode_to_tiktoken_buffer
        try:
            found = [encode(text, _NOTHING) for text in texts]
        except (ValueError, TypeError, AttributeError):
            return None
        first, last = self._around[:1].tobytes(), self._around[1:].tobytes()
        pieces = [last + first] * (2 * len(found) + 1)
        pieces[0], pieces[1::2], pieces[-1] = first, found, last
        ranks = np.frombuffer(b"".join(pieces), np.uint32)
        # Bytes may go missing from a text and none are ever added, so one sum speaks for each.
        if stated is None:
            stated = sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
        if self._widths.take(ranks).sum(dtype=np.int64) != stated:
            return None
        lengths = np.array([memoryview(one).nbytes for one in found]) // ranks.itemsize + 2
        return self._table(bos, eos, dtype).take(ranks), lengths

    def for_another_thread(self) -> "FastEncoder":
        """The same with an engine of its own: an engine belongs to the thread that used it first,
        and every other takes a seventh longer (what it scribbles on lies in a pool behind a lock).
        """
        other = copy(self)
        other.encoding = copy(self.encoding)
        return other

    def _table(self, bos: int, eos: int, dtype: type[Any]) -> NDArray[Any]:
        """The id of each rank, those of the two tokens around a document included."""
        if self._asked != (bos, eos, dtype):
            self._asked = (bos, eos, dtype)
            self._answer = np.append(self._ids, [bos, eos]).astype(dtype)
        return self._answer

    def _bytes(self, ranks: Ids, lengths: Lengths) -> Lengths:
        """Bytes that the ranks of each text stand for."""
        some = lengths > 0  # reduceat has no sum of nothing
        bytes_ = np.zeros(len(lengths), np.int64)
        if some.any():
            starts = (np.cumsum(lengths) - lengths)[some]
            bytes_[some] = np.add.reduceat(self._widths.take(ranks), starts, dtype=np.int64)
        return bytes_

    def encode(self, texts: Sequence[str]) -> list[Ids | None]:
        """Ids of each text; None where it must be left to `tokenizers`."""
        found = [self._ranks(text) for text in texts]
        taken = [(number, item) for number, item in enumerate(found) if item is not None]
        if not taken:
            return [None] * len(texts)
        flat = np.concatenate([ranks for _, (ranks, _) in taken])
        ids = self._ids.take(flat)
        lengths = np.array([len(ranks) for _, (ranks, _) in taken])
        stops = np.cumsum(lengths)
        # Bytes of each text, as its tokens have them and as it has them.
        whole = self._bytes(flat, lengths) == [width for _, (_, width) in taken]
        encoded: list[Ids | None] = [None] * len(texts)
        start = 0
        for (number, _), stop, kept in zip(taken, stops.tolist(), whole.tolist(), strict=True):
            if kept:
                encoded[number] = ids[start:stop]
            start = stop
        return encoded

    def _ranks(self, text: str) -> tuple[Ids, int] | None:
        """Ranks of a text and its length in bytes, or None."""
        try:
            normal = self._normal(text)
            if any(token in text or token in normal for token in self._added):
                return None
            ranks = self.encoding.encode_to_numpy(normal, disallowed_special=())
            return ranks, len(normal) if normal.isascii() else len(normal.encode())
        except (ValueError, TypeError, AttributeError):
            return None  # out of stack, or not a text at all: `tokenizers` will say

    def _normal(self, text: str) -> str:
        if self._normalizer is None or text.isascii():
            return text
        return str(self._normalizer.normalize_str(text))

    def _compare(self, engine: tokenizers.Tokenizer) -> None:
        encodings = engine.encode_batch_fast(list(SAMPLES), add_special_tokens=False)
        for text, ids, expected in zip(SAMPLES, self.encode(SAMPLES), encodings, strict=True):
            if ids is not None and ids.tolist() != expected.ids:
                raise UnprovedError(f"the two encoders differ on {text[:40]!r}")


def _prove(content: dict[str, Any], merges: Merges, fingerprint: str) -> Proof:
    cut = content["pre_tokenizer"]
    asked = json.dumps(cut, sort_keys=True)
    pattern = _answer(proved("cuts", asked, lambda: _verdict(lambda: pattern_of(cut))))
    lost = _answer(proved("merges", fingerprint, lambda: _verdict(merges.unreachable)))
    return Proof(pattern, lost, versions())


def _verdict(prove: Any) -> dict[str, Any]:
    """An answer or the reason why there is none, as JSON."""
    try:
        return {"found": prove()}
    except UnprovedError as reason:
        return {"why": str(reason)}


def _answer(verdict: dict[str, Any]) -> Any:
    if "why" in verdict:
        raise UnprovedError(verdict["why"])
    return verdict["found"]


def _normalizer(engine: tokenizers.Tokenizer, content: dict[str, Any] | None) -> Any:
    """The engine's own normalizer, if it leaves ASCII alone; None if it has none."""
    if content is None:
        return None
    if content["type"] not in NORMAL_FORMS:
        raise UnprovedError(f"its normalizer is {content['type']}")
    return engine.normalizer


def _plain_added(added: list[dict[str, Any]]) -> tuple[str, ...]:
    """Added tokens that text becomes: those that are not special."""
    plain = tuple(token["content"] for token in added if not token["special"])
    if len(plain) > MOST_ADDED:
        raise UnprovedError(f"it has {len(plain)} added tokens that are not special")
    return plain
