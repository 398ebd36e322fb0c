"""Scores of tasks: questions in context by likelihood, generated answers graded, pass@k."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundling.config.errors import ConfigError
from foundling.eval.likelihood import Scorer, Span, SpanScore, alike
from foundling.eval.oom_retry import is_cut, run_with_fewer_rows
from foundling.generate.engine import Completion, Engine
from foundling.generate.sampling import Sampling
from foundling.tasks.base import Example, Task
from foundling.tasks.in_context import IclTask, InContextQuestion
from foundling.tasks.registry import graded
from foundling.tokenizer.tokenizer import Tokenizer

# Tasks that a model answers in its own words, graded one by one; pass@k where it may try often.
#
# Greedy by default, so that a score is a property of the weights alone. With several samples a
# question counts by the share that is right (pass@1), and pass@k is the unbiased estimate of Chen
# et al. 2021: of n samples with c right ones, 1 - C(n-c, k) / C(n, k).

DEFAULT_ROWS = 64
DEFAULT_REPLY_TOKENS = 128
NEXT_QUESTION = "\nQuestion:"

GeneratedLine = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How questions are put."""

    as_text: bool = False
    """The model was never fine-tuned: questions and answers as a document has them."""
    samples: int = 1
    temperature: float = 0.0
    seed: int = 0
    rows: int = DEFAULT_ROWS
    """Replies at a time."""

    def __post_init__(self) -> None:
        if self.samples > 1 and not self.temperature:
            raise ConfigError(
                f"{self.samples} samples at temperature 0 are all the same; give --temperature."
            )

    def to_json(self) -> dict[str, Any]:
        """What decides the result."""
        return {
            "as_text": self.as_text,
            "samples": self.samples,
            "temperature": self.temperature,
            "seed": self.seed,
        }


def run_generative(
    engine: Engine,
    tokenizer: Tokenizer,
    task: Task,
    examples: Sequence[Example],
    asking: Asking,
    done: Callable[[list[GeneratedLine]], None],
    between: Callable[[], None] = lambda: None,
) -> None:
    """Ask these examples of `task`, those of like length together; `done` gets every batch's
    lines."""
    limit = int(getattr(task, "max_new_tokens", DEFAULT_REPLY_TOKENS))
    room = max(1, most - limit) if (most := engine.model.max_positions) else 0
    asked = [(e, _prompt(tokenizer, task, e, asking.as_text)[-room:]) for e in examples]
    asked.sort(key=lambda pair: -len(pair[1]))  # stable, and longest first: what does not fit shows
    engine.max_batch = asking.rows
    size, fixed = max(1, asking.rows // asking.samples), is_cut(engine.model)
    for first in range(0, len(asked), size):
        batch = asked[first : first + size]
        between()
        replies = run_with_fewer_rows(
            engine,
            len(batch) * asking.samples,
            lambda batch=batch: _replies(engine, tokenizer, task, batch, asking),  # type: ignore[misc]
            fixed=fixed,
        )
        done([_generated_line(task, e, said) for (e, _), said in zip(batch, replies, strict=True)])


def _replies(
    engine: Engine,
    tokenizer: Tokenizer,
    task: Task,
    asked: Sequence[tuple[Example, list[int]]],
    asking: Asking,
) -> list[list[str]]:
    """For each example its replies, cut where they end."""
    prompts = [prompt for _, prompt in asked]
    limit = int(getattr(task, "max_new_tokens", DEFAULT_REPLY_TOKENS))
    stops = tuple(getattr(task, "stops", ())) + ((NEXT_QUESTION,) if asking.as_text else ())
    if asking.temperature == 0:
        found = engine.generate(prompts, limit, Sampling(), tokenizer.stop_ids)
        return [[_cut(_said(tokenizer, one), stops)] for one in found]
    texts = []
    for example, prompt in asked:
        # Keyed by the example and not by its place in a batch: a resumed evaluation says the same.
        sampling = Sampling(
            temperature=asking.temperature, seed=asking.seed * 1_000_003 + example.index
        )
        found = engine.generate([prompt] * asking.samples, limit, sampling, tokenizer.stop_ids)
        texts.append([_cut(_said(tokenizer, one), stops) for one in found])
    return texts


def _said(tokenizer: Tokenizer, completion: Completion) -> str:
    return tokenizer.decode(completion.ids, skip_special=True)


def _prompt(tokenizer: Tokenizer, task: Task, example: Example, as_text: bool) -> list[int]:
    if not as_text and not getattr(task, "as_text", False):
        return tokenizer.prompt(example.messages)
    text = example.messages[-1]["content"]
    if hasattr(task, "text_prompt"):
        text = task.text_prompt(example)
    elif not getattr(task, "as_text", False):
        text = f"Question: {text}\nAnswer:"
    return [tokenizer.bos_id, *tokenizer.encode(text)]


def _cut(text: str, stops: Collection[str]) -> str:
    # A stop at the very beginning is the blank line before a reply.
    start = len(text) - len(text.lstrip())
    ends = [at for stop in stops if (at := text.find(stop, start)) >= 0]
    return text[: min(ends, default=len(text))]


def _generated_line(task: Task, example: Example, replies: Sequence[str]) -> GeneratedLine:
    grades = [graded(task, example, reply) for reply in replies]
    right = sum(bool(grade.correct) for grade in grades)
    line: GeneratedLine = {"id": example.key, "score": right / len(grades), "weight": 1.0}
    if len(grades) > 1:
        line |= {"samples": len(grades), "right": right}
    measured = [f1 for grade in grades if (f1 := getattr(grade, "f1", None)) is not None]
    if measured:
        line["f1"] = sum(measured) / len(measured)
    return {**line, "reply": replies[0]}


def pass_at(k: int, n: int, right: int) -> float:
    """The chance that one of k samples is right, from n samples of which `right` were."""
    return 1.0 if n - right < k else 1.0 - math.comb(n - right, k) / math.comb(n, k)


def summary(lines: Sequence[GeneratedLine]) -> dict[str, Any]:
    """What a generative task has besides its accuracy: mean F1, pass@k."""
    more: dict[str, Any] = {}
    if lines and all("f1" in line for line in lines):
        more["f1"] = sum(line["f1"] for line in lines) / len(lines)
    if lines and all("samples" in line for line in lines):
        n = min(line["samples"] for line in lines)
        for k in [k for k in (1, 2, 5, 10, 25, 50, 100) if k <= n]:
            each = [pass_at(k, line["samples"], line["right"]) for line in lines]
            more[f"pass@{k}"] = sum(each) / len(each)
    return more


# Questions with solved examples before them, from text to right or wrong.
#
# What is judged of each text is what the public scorers judge: in multiple choice everything behind
# the tokens that all answers begin with, in a schema the tokens that all of them end with, in
# language modelling what follows the prompt. Every text begins with BOS. A text longer than a model
# has positions for loses its beginning (and then BOS with it), as in the public scorers; a rotary
# model has no such end, whatever lengths it was trained on.

AT_ONCE = 64
"""Questions that are turned into tokens together."""
AT_HAND = 2048
"""Questions that are sorted by length together: all tokens of a large task are gigabytes."""

InContextLine = dict[str, Any]
"""One example's result as it is written down."""


def run_icl(
    scorer: Scorer,
    tokenizer: Tokenizer,
    task: IclTask,
    places: Sequence[int],
    done: Callable[[list[InContextLine]], None],
) -> None:
    """Judge the questions at these places of `task`; `done` gets every batch's lines."""
    for first in range(0, len(places), AT_HAND):
        questions = [task.question(place) for place in places[first : first + AT_HAND]]
        groups = spans_of(tokenizer, questions, scorer.model.max_positions)
        for numbers, scores in scorer.run(groups, exact=task.kind == "language_modeling"):
            pairs = zip(numbers, scores, strict=True)
            done([judged(questions[number], of_texts) for number, of_texts in pairs])


def spans_of(
    tokenizer: Tokenizer, questions: Sequence[InContextQuestion], max_positions: int | None
) -> list[list[Span]]:
    """The tokens of every question's texts, and what is judged of each."""
    return [
        [_cropped(span, max_positions) for span in _spans(question, tokens)]
        for question, tokens in zip(questions, _encoded(tokenizer, questions), strict=True)
    ]


def _encoded(
    tokenizer: Tokenizer, questions: Sequence[InContextQuestion]
) -> Iterator[list[NDArray[np.int64]]]:
    bos = np.array([tokenizer.bos_id], np.int64)
    for first in range(0, len(questions), AT_ONCE):
        some = questions[first : first + AT_ONCE]
        ids = iter(tokenizer.encode_arrays([text for q in some for text in q.texts]))
        for question in some:
            yield [np.concatenate([bos, next(ids).astype(np.int64)]) for _ in question.texts]


def _spans(question: InContextQuestion, tokens: Sequence[NDArray[np.int64]]) -> list[Span]:
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


def judged(question: InContextQuestion, scores: Sequence[SpanScore]) -> InContextLine:
    """Right or wrong, and what it rests on."""
    if question.kind == "language_modeling":
        (only,) = scores
        return _in_context_line(question, only.exact, {"loss": round(only.mean, 6)})
    means = [score.mean for score in scores]
    # The first of equals; a mean of nothing (NaN) wins only if it comes first, as in Python's min.
    chosen = means.index(min(means))
    losses = [round(mean, 6) for mean in means]
    return _in_context_line(question, chosen == question.gold, {"chosen": chosen, "losses": losses})


def _in_context_line(
    question: InContextQuestion, right: bool, more: dict[str, Any]
) -> InContextLine:
    return {"id": question.id, "score": float(right), "weight": 1.0, **more}
