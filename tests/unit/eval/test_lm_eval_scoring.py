"""Tokens scored in batches and from caches, against one row at a time."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foundling.config.errors import ConfigError, DataError
from foundling.config.model import ModelConfig
from foundling.eval.lm_eval_scoring import (
    LEAST_PREFIX,
    HarnessSpan,
    TokenScorer,
    TokenScores,
    batches,
    clusters,
    fitted,
)
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer

CPU = torch.device("cpu")
VOCAB = 97
WINDOW = 200


def model(**more: Any) -> Transformer:
    fields = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "init_std": 1.0}
    made = Transformer(ModelConfig(vocab_size=VOCAB, init_head_std=0.5, **fields | more))
    init_weights(made, 5)
    return made.eval()


def plain(model: Transformer, spans: Sequence[HarnessSpan]) -> list[TokenScores]:
    """No batch, no cache, no cut that is not spelled out."""
    found = []
    for span in spans:
        tokens = (span.context + span.target)[-(WINDOW + 1) :]
        with torch.no_grad():
            logits = model(torch.tensor([tokens[:-1]]))[0].double().log_softmax(-1)
        rows = logits[-len(span.target) :]
        values = [float(row[token]) for row, token in zip(rows, span.target, strict=True)]
        right = [int(row.argmax()) == token for row, token in zip(rows, span.target, strict=True)]
        found.append(TokenScores(sum(values), all(right)))
    return found


def requests(model: Transformer) -> list[HarnessSpan]:
    """Choices of one context, few-shot questions with one beginning, single texts, long ones."""
    rng = random.Random(3)

    def words(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB) for _ in range(count))

    shots = words(LEAST_PREFIX + 20)
    spans = []
    for _ in range(6):
        question = shots + words(rng.randrange(1, 30))
        spans += [HarnessSpan(question, words(rng.randrange(1, 6))) for _ in range(4)]
    for _ in range(5):
        context = words(rng.randrange(20, 60))
        spans += [HarnessSpan(context, words(1)) for _ in range(3)]
    spans += [HarnessSpan(words(1), words(rng.randrange(1, 80))) for _ in range(5)]
    spans += [HarnessSpan(words(WINDOW + 30), words(9)), HarnessSpan(words(2), words(WINDOW))]
    likely = words(12)
    with torch.no_grad():
        spans.append(HarnessSpan(likely, (int(model(torch.tensor([likely]))[0, -1].argmax()),)))
    rng.shuffle(spans)
    return spans


@pytest.mark.parametrize(
    "fields",
    [{}, {"window": 24}, {"positions": "learned", "max_positions": WINDOW}, {"logit_softcap": 9.0}],
    ids=["rotary", "windows", "learned", "softcap"],
)
def test_every_score_is_that_of_one_row_alone(fields: dict[str, Any]) -> None:
    ours = model(**fields)
    spans = requests(ours)
    scores = TokenScorer(ours, CPU, window=WINDOW, positions=2000).score(spans)
    for mine, expected in zip(scores, plain(ours, spans), strict=True):
        assert mine.logprob == pytest.approx(expected.logprob, abs=2e-4)
        assert mine.is_greedy == expected.is_greedy
    assert any(score.is_greedy for score in scores)
    assert not all(score.is_greedy for score in scores)


def test_shared_beginnings_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = model()
    spans = requests(ours)
    seen: list[int] = []
    hidden = Transformer.hidden

    def counted(self: Transformer, tokens: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        seen.append(tokens.numel())
        return hidden(self, tokens, *rest, **more)

    monkeypatch.setattr(Transformer, "hidden", counted)
    TokenScorer(ours, CPU, window=WINDOW).score(spans)
    assert sum(seen) < 0.6 * sum(min(len(s.context) + len(s.target), WINDOW) for s in spans)


def test_a_batch_that_does_not_fit_is_halved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = model()
    spans = requests(ours)
    expected = TokenScorer(ours, CPU, window=WINDOW).score(spans)
    hidden = Transformer.hidden

    def narrow(self: Transformer, tokens: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        if tokens.numel() > 500:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return hidden(self, tokens, *rest, **more)

    monkeypatch.setattr(Transformer, "hidden", narrow)
    scorer = TokenScorer(ours, CPU, window=WINDOW)
    for mine, other in zip(scorer.score(spans), expected, strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=2e-4)
    assert scorer.positions < 4096
    assert "did not fit" in capsys.readouterr().err


def test_one_question_that_never_fits_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Transformer, "hidden", none)
    with pytest.raises(ConfigError, match=r"one question of 7 tokens.*max_length"):
        TokenScorer(model(), CPU, window=WINDOW).score([HarnessSpan((1, 2, 3, 4), (5, 6, 7, 8))])


def test_every_span_is_in_one_batch_and_rows_stay_in_bounds() -> None:
    spans = fitted(requests(model()), WINDOW)
    places = []
    for cluster in clusters(spans):
        lengths = [question.longest for question in cluster.questions]
        assert lengths == sorted(lengths, reverse=True)
        for batch in batches(cluster.questions, 900, 5):
            rows = sum(len(question.targets) for question in batch)
            assert len(batch) == 1 or (rows <= 5 and rows * batch[0].longest <= 900)
            for question in batch:
                assert question.context[: len(cluster.prefix)] == cluster.prefix
                assert len(question.context) > len(cluster.prefix)
                places += [place for place, _ in question.targets]
    assert sorted(places) == list(range(len(spans)))


def test_what_cannot_be_scored_is_said() -> None:
    with pytest.raises(DataError, match=r"201 tokens and the model sees 200.*max_length"):
        fitted([HarnessSpan((1,), (2,) * 201)], WINDOW)
    with pytest.raises(DataError, match="empty"):
        fitted([HarnessSpan((), (2,))], WINDOW)
