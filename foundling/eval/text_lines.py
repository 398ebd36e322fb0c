"""Held-out text as an evaluation task: a line a document, and what they amount to.

A document weighs its bytes, so the weighted mean of bits per byte is total bits over total bytes;
of several sources each weighs as much as its share of the mixture. Perplexity is per token of this
tokenizer, and says so by its name. A document is known by its text and not by its place: data sets
that were built with other tokenizers, or in other folders, hold the same documents at other places,
and bits per byte are there to be compared.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from foundling.eval.bpb import HeldOut, mean_by
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
    weights: Sequence[float],
) -> list[Line]:
    """One line a document: bits per byte, and what it weighs."""
    return [
        {
            "id": id,
            "score": nats / math.log(2) / max(int(document.text_bytes), 1),
            "weight": float(weight),
            "bytes": int(document.text_bytes),
            "nats": nats,
            "tokens": targets,
            "source": source,
        }
        for id, source, document, (nats, targets), weight in zip(
            ids, sources, documents, losses, weights, strict=True
        )
    ]


def scales_of(
    sources: Mapping[str, Sequence[HeldOut]], shares: Mapping[str, float]
) -> dict[str, float]:
    """What a byte of each source weighs, so that the source weighs its share; 1 if it is alone."""
    size = {name: sum(int(one.text_bytes) for one in some) for name, some in sources.items()}
    whole = sum(shares[name] for name in sources)
    every = sum(size.values())
    return {name: shares[name] / whole / (size[name] / every) for name in sources}


def bpb_entry(lines: list[Line], shares: Mapping[str, float]) -> dict[str, Any]:
    """Bits per byte and perplexity, of the mixture and of each source."""
    sources = sorted({line["source"] for line in lines})
    parts = {name: _figures([line for line in lines if line["source"] == name]) for name in sources}

    def mean(field: str) -> float:
        return mean_by({name: part[field] for name, part in parts.items()}, shares) or 0.0

    score = mean_score("bpb", lines)
    return {
        "value": mean("value"),
        "n": score.n,
        "stderr": score.stderr,
        "bytes": sum(part["bytes"] for part in parts.values()),
        "tokens": sum(part["tokens"] for part in parts.values()),
        "loss": (loss := mean("loss")),
        "perplexity_per_token": perplexity(loss),
        "metric": BITS,
        "by_source": parts,
    }


def _figures(lines: Sequence[Line]) -> dict[str, Any]:
    score = mean_score("bpb", lines)
    tokens, size = (sum(line[field] for line in lines) for field in ("tokens", "bytes"))
    nats = sum(line["nats"] for line in lines)
    return {
        # The mean of the lines, but for documents of no bytes: they weigh nothing and cost bits.
        "value": nats / math.log(2) / size,
        "n": score.n,
        "stderr": score.stderr,
        "bytes": size,
        "tokens": tokens,
        "loss": nats / tokens,
        "perplexity_per_token": perplexity(nats / tokens),
    }


def perplexity(loss: float) -> float:
    """Of nats per token; as much as a float can say."""
    return math.exp(min(loss, 700.0))
