"""Questions with solved examples before them, from text to right or wrong.

What is judged of each text is what the public scorers judge: in multiple choice everything behind
the tokens that all answers begin with, in a schema the tokens that all of them end with, in
language modelling what follows the prompt. Every text begins with BOS. A text longer than a model
has positions for loses its beginning (and then BOS with it), as in the public scorers; a rotary
model has no such end, whatever lengths it was trained on.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundling.eval.likelihood import Scorer, Span, SpanScore, alike
from foundling.tasks.icl import IclTask, Question
from foundling.tokenizer import Tokenizer

AT_ONCE = 64
"""Questions that are turned into tokens together."""
AT_HAND = 2048
"""Questions that are sorted by length together: all tokens of a large task are gigabytes."""

Line = dict[str, Any]
"""One example's result as it is written down."""


def run_icl(
    scorer: Scorer,
    tokenizer: Tokenizer,
    task: IclTask,
    places: Sequence[int],
    done: Callable[[list[Line]], None],
) -> None:
    """Judge the questions at these places of `task`; `done` gets every batch's lines."""
    for first in range(0, len(places), AT_HAND):
        questions = [task.question(place) for place in places[first : first + AT_HAND]]
        groups = spans_of(tokenizer, questions, scorer.model.max_positions)
        for numbers, scores in scorer.run(groups, exact=task.kind == "language_modeling"):
            pairs = zip(numbers, scores, strict=True)
            done([judged(questions[number], of_texts) for number, of_texts in pairs])


def spans_of(
    tokenizer: Tokenizer, questions: Sequence[Question], max_positions: int | None
) -> list[list[Span]]:
    """The tokens of every question's texts, and what is judged of each."""
    return [
        [_cropped(span, max_positions) for span in _spans(question, tokens)]
        for question, tokens in zip(questions, _encoded(tokenizer, questions), strict=True)
    ]


def _encoded(
    tokenizer: Tokenizer, questions: Sequence[Question]
) -> Iterator[list[NDArray[np.int64]]]:
    bos = np.array([tokenizer.bos_id], np.int64)
    for first in range(0, len(questions), AT_ONCE):
        some = questions[first : first + AT_ONCE]
        ids = iter(tokenizer.encode_arrays([text for q in some for text in q.texts]))
        for question in some:
            yield [np.concatenate([bos, next(ids).astype(np.int64)]) for _ in question.texts]


def _spans(question: Question, tokens: Sequence[NDArray[np.int64]]) -> list[Span]:
    if question.kind == "multiple_choice":
        start = alike(tokens)
        return [Span(text, max(1, start)) for text in tokens]
    if question.kind == "schema":
        common = alike([text[::-1] for text in tokens])
        return [Span(text, max(1, len(text) - common)) for text in tokens]
    # Where the prompt's last token grew together with the answer's first, that one is judged too.
    return [Span(tokens[1], max(1, alike(tokens)))]


def _cropped(span: Span, max_positions: int | None) -> Span:
    over = len(span.tokens) - max_positions if max_positions else 0
    if over <= 0:
        return span
    return Span(np.ascontiguousarray(span.tokens[over:]), max(1, span.start - over))


def judged(question: Question, scores: Sequence[SpanScore]) -> Line:
    """Right or wrong, and what it rests on."""
    if question.kind == "language_modeling":
        (only,) = scores
        return _line(question, only.exact, {"loss": round(only.mean, 6)})
    means = [score.mean for score in scores]
    # The first of equals; a mean of nothing (NaN) wins only if it comes first, as in Python's min.
    chosen = means.index(min(means))
    losses = [round(mean, 6) for mean in means]
    return _line(question, chosen == question.gold, {"chosen": chosen, "losses": losses})


def _line(question: Question, right: bool, more: dict[str, Any]) -> Line:
    return {"id": question.id, "score": float(right), "weight": 1.0, **more}
