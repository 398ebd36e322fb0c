"""Held-out text as an evaluation task: a line a document, and what they amount to.

A document weighs its bytes, so the weighted mean of bits per byte is total bits over total bytes;
perplexity is per token of this tokenizer, and says so by its name.
"""

import math
from collections.abc import Sequence
from typing import Any

from foundling.eval.bpb import HeldOut
from foundling.eval.results import BITS, Line, mean_score


def bpb_lines(
    places: Sequence[tuple[str, int]],
    documents: Sequence[HeldOut],
    losses: Sequence[tuple[float, int]],
) -> list[Line]:
    """One line a document: bits per byte, weighed by bytes."""
    return [
        {
            "id": f"{source}:{number}",
            "score": nats / math.log(2) / max(int(document.text_bytes), 1),
            "weight": float(document.text_bytes),
            "nats": nats,
            "tokens": targets,
            "source": source,
        }
        for (source, number), document, (nats, targets) in zip(
            places, documents, losses, strict=True
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
