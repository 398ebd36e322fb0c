"""What a task is: examples to put to a model, and a grade for each reply.

One object a task, because questions and answers belong together; the same grade scores
an evaluation and rewards a policy. Rejected: separate data sets, metrics and reward functions that
meet by name (they drift apart), and a base class to inherit from (a protocol lets a user's own file
hold a task without importing ours).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

ChatMessage = Mapping[str, str]
"""One turn of a conversation: `role` and `content`."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One thing to ask, and what to know about it when the scores are broken down."""

    index: int
    """Place in the task's list, so that a task can find its own answer again."""
    messages: tuple[ChatMessage, ...]
    answer: str
    group: str
    """Coarse class, for the summary: a quiz has facts, sums and unknown."""
    kind: str
    """Fine class, for the breakdown."""
    documents_only: bool = False
    """The answer stands in pretraining documents and in no conversation."""
    id: str = ""
    """The same for every model and subsample; empty: the index."""

    @classmethod
    def asked(cls, index: int, question: str, answer: str, kind: str, id: str = "") -> "Example":
        """A question of one turn, whose coarse and fine class are the same."""
        said = ({"role": "user", "content": question},)
        return cls(index=index, messages=said, answer=answer, group=kind, kind=kind, id=id)

    @property
    def key(self) -> str:
        """By which the example is known in results."""
        return self.id or str(self.index)


@dataclass(frozen=True, kw_only=True)
class Grade:
    """The judgement of one reply."""

    correct: bool
    f1: float | None = None
    """Shared words with the answer, where a task measures them."""
    declined: bool = False
    """The reply says that it does not know."""

    @property
    def reward(self) -> float:
        """The grade as a number to reinforce."""
        return float(self.correct)


class Task(Protocol):
    """Anything with a name, examples and grades.

    A task may also say `max_new_tokens` (longest reply), `as_text` (True: the messages are text to
    continue, not a chat), `stops` (texts that end a reply) and `baseline` (what guessing scores).
    """

    @property
    def name(self) -> str:
        """What the task is called in scores and reports."""
        ...

    def examples(self) -> Sequence[Example]:
        """Every example, always the same ones in the same order."""
        ...

    def grade(self, example: Example, reply: str) -> Grade:
        """Judge a reply to one of the examples."""
        ...


@dataclass(frozen=True, kw_only=True)
class Score:
    """A number with the sample it rests on."""

    name: str
    value: float
    n: int
    stderr: float

    @classmethod
    def of_share(cls, name: str, right: int, n: int) -> "Score | None":
        """A share of successes with its binomial standard error; nothing asked gives no score."""
        if not n:
            return None
        value = right / n
        return cls(name=name, value=value, n=n, stderr=math.sqrt(value * (1 - value) / n))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
