"""Bits per byte of held-out text, exact to the token, beside the floor that the text allows."""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from foundling.config.errors import DataError
from foundling.data.dataset import HeldOutDoc
from foundling.eval.results import BITS, Line, mean_score
from foundling.eval.task_scoring import evaluation_engine
from foundling.generate.engine import Engine
from foundling.model.transformer import Transformer
from foundling.plan.serving import HELD_OUT_TOKENS
from foundling.tokenizer.tokenizer import Tokenizer

# Each document is fed alone as it is stored (BOS ... EOS), so a score never depends on what it was
# packed with, and bits are divided by UTF-8 bytes, so it never depends on the tokenizer either.
# Rejected: averaging batch means (short batches would weigh as much as long ones) and scoring
# packed training rows (the cut would be scored too).

PART_STEPS = 16
"""Steps of the engine whose documents are sorted by length together: what a kill costs at most, and
what is in memory as lists."""


@dataclass(frozen=True, kw_only=True)
class KindScore:
    """The score of one kind of document."""

    bpb: float
    floor_bpb: float | None
    bytes: int
    documents: int


@dataclass(frozen=True, kw_only=True)
class BpbScore:
    """Held-out bits per byte, the floor if it is known, and what both rest on."""

    bpb: float
    floor_bpb: float | None
    """The least that any model can reach; None if a document has no known floor."""
    loss: float
    """Nats per token, comparable with the training loss."""
    floor_loss: float | None
    by_kind: dict[str, KindScore]
    bytes: int
    tokens: int
    """Input positions, each of which predicts one target."""
    documents: int


@dataclass(frozen=True, kw_only=True)
class LossScore:
    """Held-out loss over the targets that count: for chats, the assistant's."""

    loss: float
    """Nats per target."""
    targets: int
    documents: int


def headline(
    scores: Mapping[str, BpbScore | LossScore], shares: Mapping[str, float]
) -> dict[str, float | None]:
    """What a mixture scores: the mean of its sources' scores by their shares of its tokens.

    Bits per byte are the text's alone, the loss is every source's. A source without a share is left
    out: one that a later phase of a run brings in would change what the number means on the way.
    """
    own: dict[str, BpbScore | LossScore] = {n: s for n, s in scores.items() if n in shares}
    if not own:
        raise DataError(
            "the held-out split holds nothing; build the data with a larger one (--val-share)."
        )
    text = {name: score for name, score in own.items() if isinstance(score, BpbScore)}
    floors = own if len(text) == len(own) else {}
    return {
        "bpb": mean_by({name: score.bpb for name, score in text.items()}, shares),
        "floor_bpb": mean_by({name: score.floor_bpb for name, score in text.items()}, shares),
        "loss": mean_by({name: score.loss for name, score in own.items()}, shares),
        "floor_loss": mean_by(
            {n: getattr(s, "floor_loss", None) for n, s in floors.items()}, shares
        ),
    }


def mean_by(values: Mapping[str, float | None], shares: Mapping[str, float]) -> float | None:
    """The mean by shares of those that are named; None of nothing, or where one is unknown."""
    known = {name: value for name, value in values.items() if value is not None}
    if not known or len(known) < len(values):
        return None
    whole = sum(shares[name] for name in known)
    return sum(shares[name] / whole * value for name, value in known.items())


def kinds_of(
    scores: Mapping[str, BpbScore], shares: Mapping[str, float]
) -> dict[str, dict[str, Any]]:
    """The scores of each kind of document in a mixture: a source's bytes count by its share."""
    if len(scores) == 1:  # as they are, to the last bit
        return {
            kind: asdict(score) for one in scores.values() for kind, score in one.by_kind.items()
        }
    found = {}
    for kind in sorted({kind for score in scores.values() for kind in score.by_kind}):
        parts = {
            name: score.by_kind[kind] for name, score in scores.items() if kind in score.by_kind
        }
        weights = {n: shares[n] / scores[n].bytes * part.bytes for n, part in parts.items()}
        found[kind] = {
            "bpb": mean_by({name: part.bpb for name, part in parts.items()}, weights),
            "floor_bpb": mean_by({name: part.floor_bpb for name, part in parts.items()}, weights),
            "bytes": sum(part.bytes for part in parts.values()),
            "documents": sum(part.documents for part in parts.values()),
        }
    return found


@dataclass
class _Sums:
    """Running totals of one group of documents."""

    nats: float = 0.0
    targets: int = 0
    bytes: int = 0
    documents: int = 0
    floor_bits: float | None = 0.0

    def add(self, document: HeldOutDoc, nats: float, targets: int) -> None:
        self.nats += nats
        self.targets += targets
        self.bytes += document.text_bytes
        self.documents += 1
        if self.floor_bits is not None:
            bits = document.floor_bits
            self.floor_bits = None if bits is None else self.floor_bits + bits

    def score(self) -> KindScore:
        return KindScore(
            bpb=self.nats / math.log(2) / self.bytes,
            floor_bpb=None if self.floor_bits is None else self.floor_bits / self.bytes,
            bytes=self.bytes,
            documents=self.documents,
        )


def held_out_bpb(
    model: Transformer,
    documents: Iterable[HeldOutDoc],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    max_tokens_per_batch: int = HELD_OUT_TOKENS,
    window: int | None = None,
    between: Callable[[], None] = lambda: None,
) -> BpbScore:
    """Total bits over total bytes. Documents longer than `window` tokens of context are scored in
    pieces, every target once; without a window each is fed whole. `between` is called before each
    step, and may raise to give up."""
    read = list(documents)
    if any(document.mask is not None for document in read):
        raise DataError(
            "bits per byte are for text and this data set holds conversations; give a text one."
        )
    total, kinds = _Sums(), defaultdict[str, _Sums](_Sums)
    engine = _engine(model, read, device, dtype, max_tokens_per_batch, window, between)
    for place, nats, targets in sorted(document_losses(engine, read, window)):
        document = read[place]
        total.add(document, nats, targets)
        kinds[document.kind].add(document, nats, targets)
    if not total.bytes:
        raise DataError("the held-out split holds no text; build the data with a larger one.")
    floor = total.floor_bits
    return BpbScore(
        **vars(total.score()),
        loss=total.nats / total.targets,
        floor_loss=None if floor is None else floor * math.log(2) / total.targets,
        by_kind={kind: sums.score() for kind, sums in sorted(kinds.items()) if sums.bytes},
        tokens=total.targets,
    )


def held_out_loss(
    model: Transformer,
    documents: Iterable[HeldOutDoc],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    between: Callable[[], None] = lambda: None,
) -> LossScore:
    """Mean loss over the targets that a chat's mask counts, or over all of a text's."""
    read = list(documents)
    engine = _engine(model, read, device, dtype, HELD_OUT_TOKENS, window, between)
    losses = list(document_losses(engine, read, window))
    targets = sum(count for _, _, count in losses)
    if not targets:
        raise DataError("the held-out split counts no target; build the data with a larger one.")
    return LossScore(
        loss=math.fsum(nats for _, nats, _ in losses) / targets,
        targets=targets,
        documents=len(read),
    )


def _engine(
    model: Transformer,
    documents: Sequence[HeldOutDoc],
    device: torch.device,
    dtype: torch.dtype,
    max_tokens: int,
    window: int | None,
    between: Callable[[], None],
) -> Engine:
    longest = max((len(document.tokens) for document in documents), default=1)
    return evaluation_engine(
        model,
        device,
        dtype=dtype,
        max_tokens=max_tokens,
        longest=min(longest, window or longest),
        before_step=between,
    )


def document_losses(
    engine: Engine, documents: Sequence[HeldOutDoc], window: int | None
) -> Iterator[tuple[int, float, int]]:
    """(place, summed nats, counted targets) of each document as it is done."""
    for places in _parts(documents, PART_STEPS * engine.scheduler.step_tokens):
        pieces = [
            (place, *piece) for place in places for piece in _pieces(documents[place], window)
        ]
        left = Counter(place for place, _, _ in pieces)
        nats, targets = dict.fromkeys(places, 0.0), dict.fromkeys(places, 0)
        yield from ((place, 0.0, 0) for place in places if not left[place])
        found = engine.score([tokens for _, tokens, _ in pieces], [1] * len(pieces))
        for number, scores in found:
            place, _, counted = pieces[number]
            logprobs = np.array(scores.logprobs)
            if counted is not None:
                logprobs = logprobs[counted]
            nats[place] -= float(logprobs.sum())
            targets[place] += len(logprobs)
            left[place] -= 1
            if not left[place]:
                yield place, nats[place], targets[place]


def _parts(documents: Sequence[HeldOutDoc], tokens: int) -> Iterator[list[int]]:
    """The places of documents, longest first, some `tokens` of them at a time."""
    part: list[int] = []
    held = 0
    for place in sorted(range(len(documents)), key=lambda place: -len(documents[place].tokens)):
        part.append(place)
        held += len(documents[place].tokens)
        if held >= tokens:
            yield part
            part, held = [], 0
    if part:
        yield part


def _pieces(document: HeldOutDoc, window: int | None) -> Iterator[tuple[Any, Any | None]]:
    """Stretches of a document that fit the window, inputs and targets overlapping by one token, and
    which of their targets count (None: all)."""
    tokens = np.asarray(document.tokens, dtype=np.int64)
    counted = None if document.mask is None else np.asarray(document.mask, dtype=bool)[1:]
    step = window or len(tokens)
    for start in range(0, len(tokens) - 1, step):
        part = None if counted is None else counted[start : start + step]
        yield tokens[start : start + step + 1], part


# Held-out text as an evaluation task: a line a document, and what they amount to.
#
# A document weighs its bytes, so the weighted mean of bits per byte is total bits over total bytes;
# of several sources each weighs as much as its share of the mixture. Perplexity is per token of
# this tokenizer, and says so by its name. A document is known by its text and not by its place:
# data sets that were built with other tokenizers, or in other folders, hold the same documents at
# other places, and bits per byte are there to be compared.


def document_ids(tokenizer: Tokenizer, documents: Sequence[HeldOutDoc]) -> list[str]:
    """What the documents say, in short; one that is there again has a number behind it."""
    seen = Counter[str]()
    ids = []
    for document in documents:
        text = tokenizer.decode(document.tokens.tolist(), skip_special=True)
        id = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
        seen[id] += 1
        ids.append(id if seen[id] == 1 else f"{id}-{seen[id]}")
    return ids


def bpb_line(
    id: str, source: str, document: HeldOutDoc, nats: float, targets: int, weight: float
) -> Line:
    """One document's line: bits per byte, and what it weighs."""
    return {
        "id": id,
        "score": nats / math.log(2) / max(document.text_bytes, 1),
        "weight": float(weight),
        "bytes": document.text_bytes,
        "nats": nats,
        "tokens": targets,
        "source": source,
    }


def scales_of(
    sources: Mapping[str, Sequence[HeldOutDoc]], shares: Mapping[str, float]
) -> dict[str, float]:
    """What a byte of each source weighs, so that the source weighs its share; 1 if it is alone."""
    size = {name: sum(one.text_bytes for one in some) for name, some in sources.items()}
    whole = sum(shares[name] for name in sources)
    every = sum(size.values())
    return {name: shares[name] / whole / (size[name] / every) for name in sources}


def bpb_entry(lines: list[Line], shares: Mapping[str, float]) -> dict[str, Any]:
    """Bits per byte and perplexity, of the mixture and of each source."""
    sources = sorted({line["source"] for line in lines})
    parts = {name: _figures([line for line in lines if line["source"] == name]) for name in sources}
    value, loss = (
        mean_by({name: part[field] for name, part in parts.items()}, shares) or 0.0
        for field in ("value", "loss")
    )
    return {
        **_figures(lines),
        "value": value,
        "loss": loss,
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
