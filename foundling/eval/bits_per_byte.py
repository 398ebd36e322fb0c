"""Bits per byte of held-out text, exact to the token, beside the floor that the text allows."""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundling.config.errors import DataError
from foundling.eval.oom_retry import Budget, is_cut, run_halving
from foundling.eval.results import BITS, Line, mean_score
from foundling.generate.sampling import check_numbers
from foundling.model.loss import IGNORE
from foundling.model.transformer import Transformer
from foundling.tokenizer.tokenizer import Tokenizer

# Bits per byte of held-out text, exact to the token, beside the floor that the text allows.
#
# Each document is fed alone as it is stored (BOS ... EOS), so a score never depends on what it was
# packed with, and bits are divided by UTF-8 bytes, so it never depends on the tokenizer either.
# Documents are batched by length to save padding; the batch changes the speed and not the number.
# Rejected: averaging batch means (short batches would weigh as much as long ones) and scoring
# packed training rows (the cut would be scored too).
#
# Shapes: B documents in a batch, T inputs of the longest of them, V vocabulary.

DEFAULT_BATCH_TOKENS = 8192


class HeldOut(Protocol):
    """What is read of a held-out document; `data.HeldOutDoc` is one."""

    @property
    def tokens(self) -> Any: ...
    @property
    def mask(self) -> Any | None: ...
    @property
    def text_bytes(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def floor_bits(self) -> float | None: ...


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

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class LossScore:
    """Held-out loss over the targets that count: for chats, the assistant's."""

    loss: float
    """Nats per target."""
    targets: int
    documents: int

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


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

    def add(self, document: HeldOut, nats: float, targets: int) -> None:
        self.nats += nats
        self.targets += targets
        self.bytes += int(document.text_bytes)
        self.documents += 1
        if self.floor_bits is not None:
            bits = document.floor_bits
            self.floor_bits = None if bits is None else self.floor_bits + float(bits)

    @property
    def bpb(self) -> float:
        return self.nats / math.log(2) / self.bytes

    @property
    def floor_bpb(self) -> float | None:
        return None if self.floor_bits is None else self.floor_bits / self.bytes


@dataclass(frozen=True)
class _Piece:
    """A stretch of one document that fits the window: inputs and targets overlap by one token."""

    document: int
    tokens: Any
    counted: Any | None = field(default=None)

    def __len__(self) -> int:
        return len(self.tokens) - 1


def _nothing() -> None:
    pass


def held_out_bpb(
    model: nn.Module,
    documents: Iterable[HeldOut],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    max_tokens_per_batch: int = DEFAULT_BATCH_TOKENS,
    window: int | None = None,
    between: Callable[[], None] = _nothing,
) -> BpbScore:
    """Total bits over total bytes. Documents longer than `window` tokens of context are scored in
    pieces, every target once; without a window each is fed whole. `between` is called before each
    batch, and may raise to give up."""
    read = list(documents)
    if any(document.mask is not None for document in read):
        raise DataError(
            "bits per byte are for text and this data set holds conversations; give a text one."
        )
    total, kinds = _Sums(), defaultdict[str, _Sums](_Sums)
    budget = Budget(max_tokens_per_batch, fixed=is_cut(model))
    losses = document_losses(model, read, device, dtype, budget, window, between)
    for document, (nats, targets) in zip(read, losses, strict=True):
        total.add(document, nats, targets)
        kinds[document.kind].add(document, nats, targets)
    if not total.bytes:
        raise DataError("the held-out split holds no text; build the data with a larger one.")
    floor = total.floor_bits
    return BpbScore(
        bpb=total.bpb,
        floor_bpb=total.floor_bpb,
        loss=total.nats / total.targets,
        floor_loss=None if floor is None else floor * math.log(2) / total.targets,
        by_kind={
            kind: KindScore(
                bpb=sums.bpb,
                floor_bpb=sums.floor_bpb,
                bytes=sums.bytes,
                documents=sums.documents,
            )
            for kind, sums in sorted(kinds.items())
            if sums.bytes
        },
        bytes=total.bytes,
        tokens=total.targets,
        documents=total.documents,
    )


def held_out_loss(
    model: nn.Module,
    documents: Iterable[HeldOut],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    max_tokens_per_batch: int = DEFAULT_BATCH_TOKENS,
    window: int | None = None,
    between: Callable[[], None] = _nothing,
) -> LossScore:
    """Mean loss over the targets that a chat's mask counts, or over all of a text's."""
    read = list(documents)
    budget = Budget(max_tokens_per_batch, fixed=is_cut(model))
    losses = document_losses(model, read, device, dtype, budget, window, between)
    targets = sum(count for _, count in losses)
    if not targets:
        raise DataError("the held-out split counts no target; build the data with a larger one.")
    return LossScore(
        loss=sum(nats for nats, _ in losses) / targets, targets=targets, documents=len(read)
    )


@torch.no_grad()
def document_losses(
    model: nn.Module,
    documents: Sequence[HeldOut],
    device: torch.device,
    dtype: torch.dtype,
    budget: Budget,
    window: int | None,
    between: Callable[[], None],
) -> list[tuple[float, int]]:
    """(summed nats, counted targets) of each document, in the order given; `budget` is how many
    positions go together, and stays smaller when memory has run out."""
    nats, targets = [0.0] * len(documents), [0] * len(documents)
    was_training = model.training
    model.eval()
    try:
        for batch in _batches(_pieces(documents, window), budget):
            between()
            done = run_halving(
                batch, lambda some: _batch_losses(model, some, device, dtype), budget
            )
            for part, (losses, counts) in done:
                for piece, loss, count in zip(part, losses, counts, strict=True):
                    nats[piece.document] += loss
                    targets[piece.document] += count
    finally:
        model.train(was_training)
    return list(zip(nats, targets, strict=True))


def _batch_losses(
    model: nn.Module, batch: Sequence[_Piece], device: torch.device, dtype: torch.dtype
) -> tuple[list[float], list[int]]:
    inputs, targets = _padded(batch)
    # Compiled blocks are for training's one shape; here every batch has another.
    with torch.compiler.set_stance("force_eager"), _autocast(device, dtype):
        losses = _target_losses(model, inputs.to(device), targets.to(device).flatten())
    check_numbers(losses)
    # Causal attention never looks right, so padding after a document cannot change its losses.
    # Summed on the CPU in double precision: not every device has doubles.
    each = losses.view(targets.shape).cpu().double()
    return each.sum(1).tolist(), (targets != IGNORE).sum(1).tolist()


def _target_losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Loss of each target [B x T]; 0 where it is IGNORE."""
    if isinstance(model, Transformer) and not is_cut(model):
        # Logits in chunks: one long document's at once can be many times the model.
        losses, _ = model.judge(model.hidden(inputs).flatten(0, 1), targets, best=False)
        return losses
    logits = model(inputs).float().flatten(0, 1)
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")


def _padded(batch: Sequence[_Piece]) -> tuple[Tensor, Tensor]:
    """Inputs and targets [B, T]; padding is input 0 (any id does) and target IGNORE."""
    width = max(len(piece) for piece in batch)
    inputs = np.zeros((len(batch), width), dtype=np.int64)
    targets = np.full((len(batch), width), IGNORE, dtype=np.int64)
    for row, piece in enumerate(batch):
        inputs[row, : len(piece)] = piece.tokens[:-1]
        targets[row, : len(piece)] = piece.tokens[1:]
        if piece.counted is not None:
            targets[row, : len(piece)][~piece.counted] = IGNORE
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def _pieces(documents: Sequence[HeldOut], window: int | None) -> Iterator[_Piece]:
    for index, document in enumerate(documents):
        tokens = np.asarray(document.tokens, dtype=np.int64)
        counted = None if document.mask is None else np.asarray(document.mask, dtype=bool)[1:]
        step = window or len(tokens)
        for start in range(0, len(tokens) - 1, step):
            part = None if counted is None else counted[start : start + step]
            yield _Piece(index, tokens[start : start + step + 1], part)


def _batches(pieces: Iterable[_Piece], budget: Budget) -> Iterator[list[_Piece]]:
    """Pieces of similar length, at most so many positions a batch as the budget has by then; a
    longer one goes alone."""
    batch: list[_Piece] = []
    for piece in sorted(pieces, key=len):
        if batch and (len(batch) + 1) * len(piece) > budget.size:
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch


def _autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


# Held-out text as an evaluation task: a line a document, and what they amount to.
#
# A document weighs its bytes, so the weighted mean of bits per byte is total bits over total bytes;
# of several sources each weighs as much as its share of the mixture. Perplexity is per token of
# this tokenizer, and says so by its name. A document is known by its text and not by its place:
# data sets that were built with other tokenizers, or in other folders, hold the same documents at
# other places, and bits per byte are there to be compared.

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
