"""What to score, put into an order that wastes little: by length, with shared beginnings shared.

The answers of one question have one context, and the questions of one few-shot task begin with the
same examples. Where that saves more than it costs, the context is computed once and its keys and
values are kept. Rejected: a tree of all prefixes (it saves little more, since tasks share either
everything or the examples, and would keep caches of every depth alive).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from foundling.config import DataError

Tokens = tuple[int, ...]

LEAST_PREFIX = 64
"""Tokens that contexts must have in common before they are computed apart from the rest."""
LEAST_SHARERS = 4
"""Contexts that must share a prefix: fewer do not pay for a forward pass of its own."""


@dataclass(frozen=True)
class Span:
    """Tokens to score after a context, which is never empty."""

    context: Tokens
    target: Tokens


@dataclass(frozen=True)
class Question:
    """One context and every target that is asked of it, each with its place in the request."""

    context: Tokens
    targets: tuple[tuple[int, Tokens], ...]

    @property
    def longest(self) -> int:
        """Positions of its longest row."""
        return len(self.context) + max(len(target) for _, target in self.targets) - 1

    @property
    def shares(self) -> bool:
        """Whether computing the context once is cheaper than once a target."""
        size = sum(len(target) for _, target in self.targets)
        return (len(self.targets) - 1) * len(self.context) > size


@dataclass(frozen=True)
class Cluster:
    """Questions that are scored together: all with the same beginning, which may be empty."""

    prefix: Tokens
    questions: tuple[Question, ...]


def fitted(spans: Iterable[Span], window: int) -> list[Span]:
    """Spans cut on the left to what the model can see: `window` inputs, one more token in all."""
    found = []
    for span in spans:
        if not span.context or not span.target:
            raise DataError("a context or a continuation to score is empty; give it a token.")
        if len(span.target) > window:
            raise DataError(
                f"a continuation has {len(span.target)} tokens and the model sees {window};"
                " give a larger max_length or shorter texts."
            )
        room = window + 1 - len(span.target)
        found.append(Span(span.context[-room:], span.target))
    return found


def clusters(spans: Sequence[Span]) -> list[Cluster]:
    """Every span once, in groups that share a beginning; the longest questions come first, so that
    what does not fit into memory is known at once."""
    asked: dict[Tokens, list[tuple[int, Tokens]]] = defaultdict(list)
    for place, span in enumerate(spans):
        asked[span.context].append((place, span.target))
    alike: dict[Tokens, list[Question]] = defaultdict(list)
    for context, targets in asked.items():
        alike[context[:LEAST_PREFIX]].append(Question(context, tuple(targets)))
    found, apart = [], list[Question]()
    for questions in alike.values():
        prefix = _common(questions)
        if len(questions) >= LEAST_SHARERS and len(prefix) >= LEAST_PREFIX:
            found.append(Cluster(prefix, _by_length(questions)))
        else:
            apart += questions
    for shares in (True, False):
        some = [question for question in apart if question.shares == shares]
        if some:
            found.append(Cluster((), _by_length(some)))
    return sorted(found, key=lambda cluster: -cluster.questions[0].longest)


def _by_length(questions: Iterable[Question]) -> tuple[Question, ...]:
    return tuple(sorted(questions, key=lambda question: (-question.longest, question.context)))


def _common(questions: Sequence[Question]) -> Tokens:
    """The beginning that all contexts have; each keeps a token of its own to be read out at."""
    low = min(question.context for question in questions)
    high = max(question.context for question in questions)
    most = min(len(question.context) for question in questions) - 1
    length = 0
    while length < most and low[length] == high[length]:
        length += 1
    return low[:length]


def batches(
    questions: Sequence[Question], positions: int, rows: int = 0
) -> Iterator[list[Question]]:
    """Neighbours whose padded rows hold at most so many positions, and at most `rows` rows (0: any
    number); one question always goes through."""
    batch: list[Question] = []
    count = width = 0
    for question in questions:
        more, wider = count + len(question.targets), max(width, question.longest)
        if batch and (more * wider > positions or (rows and more > rows)):
            yield batch
            batch, more, wider = [], len(question.targets), question.longest
        batch.append(question)
        count, width = more, wider
    if batch:
        yield batch
