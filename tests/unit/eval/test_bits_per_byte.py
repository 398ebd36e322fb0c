"""Bits per byte: exact against a plain loop, whatever the batching."""

import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from foundling.config.errors import DataError
from foundling.config.model import ModelConfig
from foundling.data.dataset import HeldOutDoc
from foundling.eval.bits_per_byte import held_out_bpb, held_out_loss
from foundling.generate import engine
from foundling.model import loss
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer

CPU = torch.device("cpu")
VOCAB = 61


def made_document(
    tokens: NDArray[np.uint16],
    text_bytes: int,
    kind: str = "letter",
    floor_bits: float | None = None,
    mask: NDArray[np.uint8] | None = None,
) -> HeldOutDoc:
    return HeldOutDoc(
        tokens=tokens, mask=mask, text_bytes=text_bytes, kind=kind, floor_bits=floor_bits
    )


@pytest.fixture(scope="module")
def model() -> Transformer:
    made = Transformer(ModelConfig(vocab_size=VOCAB, dim=16, layers=2, heads=2, ffn_dim=32))
    init_weights(made, 3)
    return made.eval()


def documents(lengths: list[int], seed: int = 0) -> list[HeldOutDoc]:
    rng = np.random.default_rng(seed)
    return [
        made_document(
            tokens=rng.integers(0, VOCAB, length).astype(np.uint16),
            text_bytes=int(rng.integers(1, 5 * length)),
            kind=("letter", "gazette", "sum")[index % 3],
            floor_bits=float(rng.uniform(0, 9)),
        )
        for index, length in enumerate(lengths)
    ]


def plain_nats(model: Transformer, doc: HeldOutDoc) -> list[float]:
    """One document, one target at a time, no batch and no padding."""
    tokens = torch.from_numpy(doc.tokens.astype(np.int64))
    with torch.no_grad():
        logits: Tensor = model(tokens[None, :-1])[0].double()
    return [
        float(logits[t].logsumexp(0) - logits[t, int(tokens[t + 1])]) for t in range(len(logits))
    ]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=12),
    st.integers(1, 200),
    st.integers(0, 9),
)
def test_equals_a_plain_loop_at_every_batch_size(
    lengths: list[int], budget: int, seed: int
) -> None:
    made = Transformer(ModelConfig(vocab_size=VOCAB, dim=16, layers=1, heads=2, ffn_dim=16))
    init_weights(made, 1)
    docs = documents(lengths, seed)
    score = held_out_bpb(made, docs, CPU, max_tokens_per_batch=budget)
    nats = sum(sum(plain_nats(made, doc)) for doc in docs)
    size = sum(doc.text_bytes for doc in docs)
    assert score.bpb == pytest.approx(nats / math.log(2) / size, rel=1e-6)
    assert score.tokens == sum(lengths) - len(lengths)
    assert score.loss == pytest.approx(nats / score.tokens, rel=1e-6)
    assert (score.bytes, score.documents) == (size, len(docs))


def test_kinds_and_floors_are_token_weighted(model: Transformer) -> None:
    docs = documents([5, 30, 9, 12, 3, 22, 17])
    score = held_out_bpb(model, docs, CPU, max_tokens_per_batch=64)
    assert list(score.by_kind) == ["gazette", "letter", "sum"]
    for kind, part in score.by_kind.items():
        mine = [doc for doc in docs if doc.kind == kind]
        size = sum(doc.text_bytes for doc in mine)
        nats = sum(sum(plain_nats(model, doc)) for doc in mine)
        assert part.bpb == pytest.approx(nats / math.log(2) / size, rel=1e-6)
        assert part.floor_bpb == pytest.approx(sum(d.floor_bits or 0 for d in mine) / size)
        assert (part.bytes, part.documents) == (size, len(mine))
    floor = sum(doc.floor_bits or 0 for doc in docs)
    assert score.floor_bpb == pytest.approx(floor / score.bytes)
    assert score.floor_loss == pytest.approx(floor * math.log(2) / score.tokens)


def test_one_unknown_floor_makes_the_total_unknown_and_not_its_neighbours(
    model: Transformer,
) -> None:
    docs = [*documents([5, 6, 7]), made_document(np.array([1, 2], np.uint16), 4, "letter", None)]
    score = held_out_bpb(model, docs, CPU)
    assert score.floor_bpb is None
    assert score.floor_loss is None
    assert score.by_kind["letter"].floor_bpb is None
    assert score.by_kind["gazette"].floor_bpb is not None


@pytest.mark.parametrize("window", [1, 4, 7, 100])
def test_a_window_scores_every_target_once(model: Transformer, window: int) -> None:
    docs = documents([2, 20, 8, 29])
    score = held_out_bpb(model, docs, CPU, window=window)
    pieces = [
        made_document(doc.tokens[start : start + window + 1], 1)
        for doc in docs
        for start in range(0, len(doc.tokens) - 1, window)
    ]
    nats = sum(sum(plain_nats(model, piece)) for piece in pieces)
    assert score.tokens == sum(len(doc.tokens) - 1 for doc in docs)
    assert score.loss == pytest.approx(nats / score.tokens, rel=1e-6)


def test_the_order_of_documents_does_not_matter(model: Transformer) -> None:
    docs = documents([5, 30, 9, 12])
    forward = held_out_bpb(model, docs, CPU, max_tokens_per_batch=40)
    backward = held_out_bpb(model, docs[::-1], CPU, max_tokens_per_batch=40)
    assert forward.bpb == pytest.approx(backward.bpb, rel=1e-7)


def test_a_chat_counts_only_what_its_mask_counts(model: Transformer) -> None:
    tokens = np.array([1, 5, 9, 2, 7, 3], np.uint16)
    mask = np.array([1, 0, 0, 1, 0, 1], np.uint8)  # the first can never be predicted
    doc = made_document(tokens, 10, mask=mask)
    score = held_out_loss(model, [doc], CPU)
    nats = plain_nats(model, doc)
    assert score.targets == 2
    assert score.loss == pytest.approx((nats[2] + nats[4]) / 2, rel=1e-6)
    cut = held_out_loss(model, [doc], CPU, window=2)
    assert cut.targets == 2
    assert asdict(score) == {"loss": score.loss, "targets": 2, "documents": 1}


def test_bits_per_byte_refuse_conversations_and_emptiness(model: Transformer) -> None:
    chat = made_document(np.array([1, 2], np.uint16), 1, mask=np.ones(2, np.uint8))
    with pytest.raises(DataError, match="holds conversations"):
        held_out_bpb(model, [chat], CPU)
    with pytest.raises(DataError, match="no text"):
        held_out_bpb(model, [], CPU)
    with pytest.raises(DataError, match="no target"):
        held_out_loss(model, [], CPU)


def test_the_model_is_left_as_it_was(model: Transformer) -> None:
    model.train()
    held_out_bpb(model, documents([4]), CPU)
    assert model.training
    assert all(param.grad is None for param in model.parameters())
    model.eval()


def test_a_long_document_is_judged_in_chunks(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole logits of one long document can be many times the model."""
    docs, widest = documents([40, 3, 25]), 0
    wanted = held_out_bpb(model, docs, CPU)
    monkeypatch.setattr(engine, "SCORE_LOGITS", 1)
    monkeypatch.setattr(loss, "_most_logits", lambda device: 7 * VOCAB)
    logits = model.logits

    def noted(hidden: Tensor) -> Tensor:
        nonlocal widest
        widest = max(widest, len(hidden))
        return logits(hidden)

    monkeypatch.setattr(model, "logits", noted)
    found = held_out_bpb(model, docs, CPU)
    assert widest == 7
    assert found.bpb == pytest.approx(wanted.bpb, rel=1e-6)
    assert found.tokens == wanted.tokens
