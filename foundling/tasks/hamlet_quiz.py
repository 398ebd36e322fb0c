"""The quiz about the village: exact answers, and people who do not exist.

Whether a reply is right is for the village to say, so grading stays in `hamlet`; this is only the
door through which a model is led before it.
"""

from collections.abc import Sequence

from foundling.hamlet.quiz import is_decline, quiz
from foundling.hamlet.village import Village
from foundling.tasks.base import Example, Grade

FACTS, SUMS, UNKNOWN = "facts", "sums", "unknown"


class HamletQuiz:
    """`n` questions about the village of `village_seed`, chosen by `seed`."""

    name = "hamlet-quiz"

    def __init__(self, village_seed: int, seed: int, n: int, people: int = 100) -> None:
        self._questions = quiz(Village(village_seed, people), seed, n)

    def examples(self) -> Sequence[Example]:
        """The questions, each as a conversation of one turn."""
        return [
            Example(
                index=index,
                messages=({"role": "user", "content": question.prompt},),
                answer=question.answer,
                group=_group(question.kind, question.fact_id),
                kind=question.kind,
                documents_only=question.documents_only,
            )
            for index, question in enumerate(self._questions)
        ]

    def grade(self, example: Example, reply: str) -> Grade:
        """Right or wrong by the village's own truth, and whether the reply declined to know."""
        question = self._questions[example.index]
        return Grade(correct=question.grade(reply), declined=is_decline(reply))


def _group(kind: str, fact_id: str | None) -> str:
    if kind == "unknown":
        return UNKNOWN
    return FACTS if fact_id else SUMS
