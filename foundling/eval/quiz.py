"""A task put to a model through its chat format, answered greedily and graded.

Greedy, so that a score is a property of the weights alone and needs no seed. Every share comes
with the number of questions behind it and the binomial standard error, because 95% of 20 questions
and 95% of 2,000 are different news.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from foundling.eval.task_scoring import reply_request
from foundling.generate.engine import Engine
from foundling.tasks.base import Example, Grade, Score, Task
from foundling.tasks.hamlet_quiz import FACTS, SUMS, UNKNOWN
from foundling.tokenizer.tokenizer import Tokenizer

DEFAULT_REPLY_TOKENS = 48


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One question with what the model said and how that was judged."""

    example: Example
    text: str
    finished: bool
    """The model ended its turn itself."""
    grade: Grade

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "prompt": self.example.messages[-1]["content"],
            "answer": self.example.answer,
            "reply": self.text,
            "kind": self.example.kind,
            "documents_only": self.example.documents_only,
            "correct": self.grade.correct,
            "declined": self.grade.declined,
            "finished": self.finished,
        }


@dataclass(frozen=True, kw_only=True)
class QuizScore:
    """Shares of a quiz; a share of nothing is None."""

    name: str
    overall: Score
    documents_only: Score | None
    """Right, of the facts that stand in pretraining documents and in no conversation."""
    sums: Score | None
    unknown_declined: Score | None
    """Declined, of the questions about people who do not exist."""
    known_wrongly_declined: Score | None
    """Declined, of the questions about facts; the lower the better."""
    by_kind: dict[str, Score]
    replies: tuple[Reply, ...]

    @property
    def accuracy(self) -> float:
        return self.overall.value

    @property
    def n(self) -> int:
        return self.overall.n

    @property
    def stderr(self) -> float:
        return self.overall.stderr

    def to_json(self) -> dict[str, Any]:
        """Plain values: each share under its name, with `_n` and `_stderr` beside it."""
        flat: dict[str, Any] = {
            "name": self.name,
            "accuracy": self.accuracy,
            "n": self.n,
            "stderr": self.stderr,
        }
        for name in ("documents_only", "sums", "unknown_declined", "known_wrongly_declined"):
            score: Score | None = getattr(self, name)
            flat[name] = score.value if score else None
            flat[f"{name}_n"] = score.n if score else 0
            flat[f"{name}_stderr"] = score.stderr if score else None
        flat["by_kind"] = {
            kind: {"accuracy": score.value, "n": score.n, "stderr": score.stderr}
            for kind, score in self.by_kind.items()
        }
        flat["replies"] = [reply.to_json() for reply in self.replies]
        return flat


def run_quiz(
    engine: Engine,
    tokenizer: Tokenizer,
    task: Task,
    *,
    max_new_tokens: int = DEFAULT_REPLY_TOKENS,
    as_text: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> QuizScore:
    """Ask every example of `task`, and sum up the grades.

    `as_text` asks a model that was never fine-tuned, in the form its documents have; `progress` is
    told (answered so far, all).
    """
    examples = task.examples()
    requests = [
        reply_request(engine, tokenizer, _prompt(tokenizer, example, as_text), max_new_tokens)
        for example in examples
    ]
    replies: dict[int, Reply] = {}
    for place, completion in engine.completions(requests):
        text = tokenizer.decode(completion.ids, skip_special=True)
        if as_text:  # the next line is the next question
            text = text.partition("\n")[0]
        text, example = text.strip(), examples[place]
        replies[place] = Reply(
            example=example,
            text=text,
            finished=completion.finish == "stop",
            grade=task.grade(example, text),
        )
        if progress:
            progress(len(replies), len(examples))
    return summarise(task.name, [replies[place] for place in range(len(examples))])


def _prompt(tokenizer: Tokenizer, example: Example, as_text: bool) -> list[int]:
    if not as_text:
        return tokenizer.prompt(example.messages)
    question = example.messages[-1]["content"]
    return [tokenizer.bos_id, *tokenizer.encode(f"Question: {question} Answer:")]


def summarise(name: str, replies: Sequence[Reply]) -> QuizScore:
    """The shares of a list of graded replies."""
    overall = _share("accuracy", replies, _correct)
    if overall is None:
        raise ValueError(f"{name} has no examples")
    kinds = sorted({reply.example.kind for reply in replies})
    by_kind = {
        kind: _share(kind, [r for r in replies if r.example.kind == kind], _correct)
        for kind in kinds
    }
    return QuizScore(
        name=name,
        overall=overall,
        documents_only=_share(
            "documents_only", (r for r in replies if r.example.documents_only), _correct
        ),
        sums=_share("sums", _group(replies, SUMS), _correct),
        unknown_declined=_share("unknown_declined", _group(replies, UNKNOWN), _declined),
        known_wrongly_declined=_share("known_wrongly_declined", _group(replies, FACTS), _declined),
        by_kind={kind: score for kind, score in by_kind.items() if score},
        replies=tuple(replies),
    )


def _share(name: str, replies: Iterable[Reply], test: Callable[[Reply], bool]) -> Score | None:
    outcomes = [test(reply) for reply in replies]
    return Score.of_share(name, sum(outcomes), len(outcomes))


def _group(replies: Iterable[Reply], group: str) -> list[Reply]:
    return [reply for reply in replies if reply.example.group == group]


def _correct(reply: Reply) -> bool:
    return reply.grade.correct


def _declined(reply: Reply) -> bool:
    return reply.grade.declined
