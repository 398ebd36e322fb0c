"""Proof that tiktoken merges as the vocabulary's own list of merges does.

`tokenizers` joins two neighbours if their pair is in the list of merges, earliest in the list first
and then leftmost (call this H). tiktoken has no list: it joins two neighbours if their bytes
together are a token, lowest rank first and then leftmost (call this T). They are widely
taken for the same; this file proves it for one vocabulary, or says why it cannot.

Lemma. Whenever T makes the token u inside any text, the pair it joins is the one it joins last when
it is given the bytes of u alone. For all joins inside u's span came before, each was the best pair
of the whole text and so the best inside the span: they are the joins of T on the bytes of u, in the
same order, and after as many of them the same two parts are left. The same holds for H. So a token
that T cannot make from its own bytes is made nowhere.

Theorem. Give each token the rank of its first merge in the list. Suppose that for every token u
that T can make from its own bytes, the last pair is in the list, and that these last pairs stand in
the list in the order of the ranks. Then H = T on every text. By induction over the joins: let both
have the same parts, let T choose the pair (a, b), making u, and H the pair (c, d), making v. By the
lemma (a, b) is u's last pair, so H sees it too. All joins so far were those of T, so inside v's
span they were T's joins on the bytes of v, and (c, d) is v's last pair. If u and v differ, T says
that u has the lower rank and H that (c, d) stands before (a, b), against the order that was
supposed. So u = v, the pairs are the same, and both take the leftmost. Neither chooses nothing
while the other chooses, for each sees the pair that the other would.

Tokens that cannot be made are left out, because tiktoken takes a whole piece for a token before it
joins anything; where the vocabulary does the same (`ignore_merges`) they are kept.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundling.tokenizer.bytelevel import token_bytes
from foundling.tokenizer.unproved import UnprovedError

# Every byte that UTF-8 can hold.
NEEDED = [*range(0xC0), *range(0xC2, 0xF5)]
NO_TOKEN = 1 << 32


@dataclass(frozen=True)
class Ranks:
    """A vocabulary as tiktoken takes it."""

    ranks: dict[bytes, int]
    """From 0 without a gap."""
    ids: NDArray[np.uint32]
    """The vocabulary's own id of each rank."""
    widths: NDArray[np.int64]
    """Bytes of each rank."""


@dataclass(frozen=True)
class Merges:
    """A byte-level vocabulary with its list of merges, as bytes."""

    ids: dict[bytes, int]
    place: dict[tuple[bytes, bytes], int]
    """Where each pair stands in the list."""
    made: tuple[bytes, ...]
    """Every token that some merge makes, in order of the first."""
    looks_up_first: bool
    """Whether a piece that is a token is taken whole, before any merge."""

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> "Merges":
        """Read the `model` of a tokenizer.json; refuse what is not plain byte-level BPE."""
        if model.get("type") != "BPE":
            raise UnprovedError(f"its model is {model.get('type')} and not BPE")
        for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(name):
                raise UnprovedError(f"its model has {name} {model[name]!r}")
        ids = {raw: id for text, id in model["vocab"].items() if (raw := token_bytes(text))}
        missing = [byte for byte in NEEDED if bytes([byte]) not in ids]
        if missing:
            # With every byte a token, unk_token and byte_fallback have nothing left to do.
            raise UnprovedError(f"it has no token for the byte {missing[0]:#04x}")
        place: dict[tuple[bytes, bytes], int] = {}
        for number, merge in enumerate(model["merges"]):
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            pair = token_bytes(left), token_bytes(right)
            if pair[0] and pair[1]:
                place[pair[0], pair[1]] = number  # of a pair listed twice, the later one counts
        made: dict[bytes, int] = {}
        for (first, second), number in place.items():
            made[first + second] = min(number, made.get(first + second, number))
        in_order = sorted(made, key=made.__getitem__)
        return cls(ids, place, tuple(in_order), bool(model.get("ignore_merges")))

    def unreachable(self) -> list[int]:
        """Prove the theorem's condition; returns the ids of the tokens that are never made."""
        ranks = self.ranked().ranks
        lost: list[int] = []
        before = -1
        for token in ranks:
            if len(token) == 1:
                continue
            pair = last_pair(token, ranks)
            if pair is None:
                lost.append(self.ids[token])
                continue
            place = self.place.get(pair)
            if place is None:
                raise UnprovedError(
                    f"its merges do not make {token!r} of {pair[0]!r} and {pair[1]!r}"
                )
            if place < before:
                raise UnprovedError(f"its merges are not in the order of its tokens at {token!r}")
            before = place
        return lost

    def ranked(self, lost: Collection[int] = ()) -> Ranks:
        """What tiktoken is given, without the tokens that are never made: bytes, then what merges
        make in their order, then what is only ever looked up whole."""
        tokens = [raw for byte in range(256) if (raw := bytes([byte])) in self.ids]
        tokens += self.made
        if self.looks_up_first:
            made = set(self.made)
            tokens += [raw for raw in self.ids if len(raw) > 1 and raw not in made]
        else:
            gone = set(lost)
            tokens = [token for token in tokens if self.ids[token] not in gone]
        return Ranks(
            ranks={token: rank for rank, token in enumerate(tokens)},
            ids=np.array([self.ids[token] for token in tokens], np.uint32),
            widths=np.array([len(token) for token in tokens], np.int64),
        )


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
