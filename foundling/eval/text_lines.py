"""Held-out text as an evaluation task: a line a document, and what they amount to.

A document weighs its bytes, so the weighted mean of bits per byte is total bits over total bytes;
perplexity is per token of this tokenizer, and says so by its name. A document is known by its text
and not by its place: data sets that were built with other tokenizers, or in other folders, hold
the same documents at other places, and bits per byte are there to be compared.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from foundling.eval.bpb import HeldOut
from foundling.eval.results import BITS, Line, mean_score
from foundling.tokenizer import Tokenizer

PART_BATCHES = 8
"""Batches of documents between two writings-down: what a kill costs."""


def document_ids(tokenizer: Tokenizer, documents: Sequence[HeldOut]) -> list[str]:
    """What the documents say, in short; one that is there again has a number behind it."""
    seen = Counter[str]()
    ids = []
    for document in documents:
        text = tokenizer.decode(document.tokens.tolist(), skip_special=True)
        id = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
        seen[id] += 1
        ids.append(id if seen[id] == 1 else f"{id}-{seen[id]}")
    return ids


def parts_of(
    places: Sequence[int], documents: Sequence[HeldOut], tokens: int
) -> Iterator[list[int]]:
    """The places of documents, longest first, some `tokens` of them at a time."""
    part: list[int] = []
    held = 0
    for place in sorted(places, key=lambda place: -len(documents[place].tokens)):
        part.append(place)
        held += len(documents[place].tokens)
        if held >= tokens:
            yield part
            part, held = [], 0
    if part:
        yield part


def bpb_lines(
    ids: Sequence[str],
    sources: Sequence[str],
    documents: Sequence[HeldOut],
    losses: Sequence[tuple[float, int]],
) -> list[Line]:
    """One line a document: bits per byte, weighed by bytes."""
    return [
        {
            "id": id,
            "score": nats / math.log(2) / max(int(document.text_bytes), 1),
            "weight": float(document.text_bytes),
            "nats": nats,
            "tokens": targets,
            "source": source,
        }
        for id, source, document, (nats, targets) in zip(
            ids, sources, documents, losses, strict=True
        )
    ]


def bpb_entry(lines: list[Line]) -> dict[str, Any]:
    """Bits per byte and perplexity, of all text and of each source."""
    sources = sorted({line["source"] for line in lines})
    by_source = {name: [line for line in lines if line["source"] == name] for name in sources}
    return {
        **_figures(lines),
        "metric": BITS,
        "by_source": {name: _figures(some) for name, some in by_source.items()},
    }


def _figures(lines: Sequence[Line]) -> dict[str, Any]:
    score = mean_score("bpb", lines)
    tokens = sum(line["tokens"] for line in lines)
    nats = sum(line["nats"] for line in lines)
    loss = nats / tokens
    return {
        # The mean of the lines, but for documents of no bytes: they weigh nothing and cost bits.
        "value": nats / math.log(2) / sum(line["weight"] for line in lines),
        "n": score.n,
        "stderr": score.stderr,
        "bytes": int(sum(line["weight"] for line in lines)),
        "tokens": tokens,
        "loss": loss,
        "perplexity_per_token": math.exp(min(loss, 700.0)),
    }
