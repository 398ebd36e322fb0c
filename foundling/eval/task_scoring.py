"""Scores of tasks: questions in context by likelihood, generated answers graded, pass@k."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foundling.config.errors import ConfigError
from foundling.eval.results import Line
from foundling.generate.engine import Engine
from foundling.generate.request import Request, TokenScores
from foundling.generate.sampling import Sampling, derived_seed
from foundling.model.transformer import Transformer
from foundling.plan.serving import BLOCK, LONGEST_TASK, cached_token_bytes
from foundling.tasks.base import Example, Task
from foundling.tasks.in_context import IclTask, InContextQuestion
from foundling.tasks.registry import graded
from foundling.tokenizer.tokenizer import Tokenizer

STEP_TOKENS = {"cpu": 4096, "cuda": 65536}
"""Tokens that go through the model at once where nobody says: more than a chat needs."""


def evaluation_engine(
    model: Transformer,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    max_tokens: int = 0,
    max_running: int = 0,
    longest: int = LONGEST_TASK,
    before_step: Callable[[], None] = lambda: None,
) -> Engine:
    """An engine for many short texts, the same on every rank of a model that is cut: its cache is
    counted in tokens and not by the memory that happens to be free. `max_tokens` go through the
    model at once, and `max_running` texts (0: what suits the device); `longest` is the text of
    most tokens. Answers are decoded by CUDA graphs unless the model is being trained, which shows
    by its mode: graphs hold memory, and weights at the places where they were captured."""
    step = max_tokens or STEP_TOKENS.get(device.type, STEP_TOKENS["cpu"])
    number = (model.head_weight.dtype if dtype == torch.float32 else dtype).itemsize
    return Engine(
        model,
        device,
        dtype=None if dtype == torch.float32 else dtype,
        cache_bytes=(step + longest + 2 * BLOCK) * cached_token_bytes(model.config, number),
        max_running=max_running or max(64, step // 8),
        step_tokens=step,
        graphs=not model.training,
        before_step=before_step,
    )


def reply_request(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: Sampling | None = None,
) -> Request:
    """The request for a reply, greedy unless said, as long as the model has positions for."""
    room = max(1, most - len(prompt)) if (most := engine.max_length) else max_tokens
    return Request(
        prompt=prompt,
        max_tokens=min(max_tokens, room),
        sampling=sampling or Sampling(),
        stop_ids=tokenizer.stop_ids,
    )


# Tasks that a model answers in its own words, graded one by one; pass@k where it may try often.
#
# Greedy by default, so that a score is a property of the weights alone. With several samples a
# question counts by the share that is right (pass@1), and pass@k is the unbiased estimate of Chen
# et al. 2021: of n samples with c right ones, 1 - C(n-c, k) / C(n, k).

DEFAULT_REPLY_TOKENS = 128
NEXT_QUESTION = "\nQuestion:"


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How questions are put."""

    as_text: bool = False
    """The model was never fine-tuned: questions and answers as a document has them."""
    samples: int = 1
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples > 1 and not self.temperature:
            raise ConfigError(
                f"{self.samples} samples at temperature 0 are all the same; give --temperature."
            )


def run_generative(
    engine: Engine,
    tokenizer: Tokenizer,
    task: Task,
    examples: Sequence[Example],
    asking: Asking,
    done: Callable[[list[Line]], None],
) -> None:
    """Ask these examples of `task`; `done` gets each one's line when all its replies are there."""
    limit = int(getattr(task, "max_new_tokens", DEFAULT_REPLY_TOKENS))
    stops = tuple(getattr(task, "stops", ())) + ((NEXT_QUESTION,) if asking.as_text else ())
    room = max(1, most - limit) if (most := engine.model.max_positions) else 0
    asked = [(_prompt(tokenizer, task, e, asking.as_text)[-room:], e) for e in examples]
    asked.sort(key=lambda pair: -len(pair[0]))  # stable, and longest first: what does not fit shows
    requests = [
        reply_request(
            engine,
            tokenizer,
            prompt,
            limit,
            # Keyed by the example and not by its place: a resumed evaluation says the same.
            Sampling(
                temperature=asking.temperature,
                seed=derived_seed(asking.seed * 1_000_003 + example.index, sample),
            ),
        )
        for prompt, example in asked
        for sample in range(asking.samples)
    ]
    replies: list[dict[int, str]] = [{} for _ in asked]
    for number, completion in engine.completions(requests):
        place, sample = divmod(number, asking.samples)
        text = tokenizer.decode(completion.ids, skip_special=True)
        replies[place][sample] = _cut(text, stops)
        if len(replies[place]) == asking.samples:
            said = [replies[place][sample] for sample in range(asking.samples)]
            done([_generated_line(task, asked[place][1], said)])


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


def _generated_line(task: Task, example: Example, replies: Sequence[str]) -> Line:
    grades = [graded(task, example, reply) for reply in replies]
    right = sum(bool(grade.correct) for grade in grades)
    line: Line = {"id": example.key, "score": right / len(grades), "weight": 1.0}
    if len(grades) > 1:
        line |= {"samples": len(grades), "right": right}
    measured = [f1 for grade in grades if (f1 := getattr(grade, "f1", None)) is not None]
    if measured:
        line["f1"] = sum(measured) / len(measured)
    return {**line, "reply": replies[0]}


def pass_at(k: int, n: int, right: int) -> float:
    """The chance that one of k samples is right, from n samples of which `right` were."""
    return 1.0 if n - right < k else 1.0 - math.comb(n - right, k) / math.comb(n, k)


def summary(lines: Sequence[Line]) -> dict[str, Any]:
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


@dataclass(frozen=True)
class Span:
    """A text whose tokens from `start` on are judged."""

    tokens: NDArray[np.int64]
    start: int
    """At least 1: the first token of a text follows nothing."""


def run_icl(
    engine: Engine,
    tokenizer: Tokenizer,
    task: IclTask,
    places: Sequence[int],
    done: Callable[[list[Line]], None],
) -> None:
    """Judge the questions at these places of `task`; `done` gets each one's line when all its texts
    are scored."""
    for first in range(0, len(places), AT_HAND):
        questions = [task.question(place) for place in places[first : first + AT_HAND]]
        groups = spans_of(tokenizer, questions, engine.model.max_positions)
        owners = [(group, text) for group, spans in enumerate(groups) for text in range(len(spans))]
        spans = [span for group in groups for span in group]
        found: list[dict[int, TokenScores]] = [{} for _ in groups]
        texts, starts = [span.tokens for span in spans], [span.start for span in spans]
        for place, scores in engine.score(texts, starts):
            group, text = owners[place]
            found[group][text] = scores
            if len(found[group]) == len(groups[group]):
                done([judged(questions[group], [one for _, one in sorted(found[group].items())])])


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


def alike(texts: Sequence[NDArray[np.int64]]) -> int:
    """How many tokens all texts begin with."""
    shortest = min(len(text) for text in texts)
    same = np.ones(shortest, bool)
    for text in texts[1:]:
        same &= text[:shortest] == texts[0][:shortest]
    return shortest if same.all() else int(same.argmin())


def _cropped(span: Span, max_positions: int | None) -> Span:
    over = len(span.tokens) - max_positions if max_positions else 0
    if over <= 0:
        return span
    return Span(span.tokens[over:], max(1, span.start - over))


def judged(question: InContextQuestion, scores: Sequence[TokenScores]) -> Line:
    """Right or wrong, and what it rests on."""
    more: dict[str, Any]
    # Nats per token; NaN for a text of which nothing is judged.
    means = [one.nats / len(one.logprobs) if one.logprobs else math.nan for one in scores]
    if question.kind == "language_modeling":
        right, more = scores[0].exact, {"loss": round(means[0], 6)}
    else:
        # The first of equals; a mean of nothing (NaN) wins only if it comes first, as in Python's
        # min.
        chosen = means.index(min(means))
        right = chosen == question.gold
        more = {"chosen": chosen, "losses": [round(mean, 6) for mean in means]}
    return {"id": question.id, "score": float(right), "weight": 1.0, **more}
