"""The quiz: shares, their errors, and what is asked of the engine."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest

from foundling.eval.quiz import run_quiz
from foundling.generate.engine import Engine
from foundling.generate.request import Completion, Request
from foundling.tasks.base import Example, Grade
from foundling.tasks.hamlet_quiz import FACTS, SUMS, UNKNOWN
from foundling.tokenizer.tokenizer import Tokenizer

DECLINE = "no idea"


@dataclass(frozen=True)
class Exam:
    """Answers are the words themselves; strangers must be declined."""

    listed: tuple[Example, ...]
    name: str = "exam"

    def examples(self) -> Sequence[Example]:
        return self.listed

    def grade(self, example: Example, reply: str) -> Grade:
        return Grade(correct=reply == example.answer, declined=reply == DECLINE)


class Letters:
    """A tokenizer whose ids are code points."""

    stop_ids = frozenset({0})

    def prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return [ord(c) for c in messages[-1]["content"]]

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        assert skip_special
        return "".join(map(chr, ids))


class Parrot:
    """An engine that looks replies up, and gives them in another order than they were asked."""

    max_length = 0

    def __init__(self, replies: dict[str, str]) -> None:
        self.replies, self.requests = replies, list[Request]()

    def completions(self, requests: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        self.requests += requests
        for place, request in reversed(list(enumerate(requests))):
            assert request.stop_ids == {0}
            text = self.replies["".join(map(chr, request.prompt))]
            yield place, Completion([ord(c) for c in text], "stop")


def example(index: int, group: str, kind: str, *, hidden: bool = False) -> Example:
    return Example(
        index=index,
        messages=({"role": "user", "content": f"q{index}"},),
        answer=DECLINE if group == UNKNOWN else f"a{index}",
        group=group,
        kind=kind,
        documents_only=hidden,
    )


EXAM = Exam(
    (
        example(0, FACTS, "age", hidden=True),
        example(1, FACTS, "age", hidden=True),
        example(2, FACTS, "kin", hidden=True),
        example(3, FACTS, "kin"),
        example(4, SUMS, "sum"),
        example(5, SUMS, "sum"),
        example(6, UNKNOWN, "unknown"),
        example(7, UNKNOWN, "unknown"),
    )
)
REPLIES = {
    "q0": "a0 ",  # trailing space is not held against a model
    "q1": "wrong",
    "q2": DECLINE,
    "q3": "a3",
    "q4": "a4",
    "q5": "wrong",
    "q6": DECLINE,
    "q7": "he is a baker",
}


def run() -> tuple[dict[str, Any], Parrot]:
    parrot = Parrot(REPLIES)
    return run_quiz(cast(Engine, parrot), cast(Tokenizer, Letters()), EXAM), parrot


def test_shares_and_errors() -> None:
    score, _ = run()
    assert (score["accuracy"], score["n"]) == (4 / 8, 8)
    assert score["stderr"] == pytest.approx(math.sqrt(0.5 * 0.5 / 8))
    assert (score["documents_only"], score["documents_only_n"]) == (1 / 3, 3)
    assert (score["sums"], score["sums_n"]) == (1 / 2, 2)
    assert (score["unknown_declined"], score["unknown_declined_n"]) == (1 / 2, 2)
    assert (score["known_wrongly_declined"], score["known_wrongly_declined_n"]) == (1 / 4, 4)
    assert score["unknown_declined_stderr"] == pytest.approx(math.sqrt(0.5 * 0.5 / 2))
    assert {kind: part["accuracy"] for kind, part in score["by_kind"].items()} == {
        "age": 1 / 2,
        "kin": 1 / 2,
        "sum": 1 / 2,
        "unknown": 1 / 2,
    }


def test_json_has_the_promised_keys() -> None:
    found, _ = run()
    assert {"accuracy", "n", "stderr", "documents_only"} <= set(found)
    assert found["documents_only"] == pytest.approx(1 / 3)
    assert found["documents_only_n"] == 3
    assert found["known_wrongly_declined"] == 0.25
    assert found["by_kind"]["age"] == {"accuracy": 0.5, "n": 2, "stderr": pytest.approx(0.3535534)}
    assert found["replies"][0] == {
        "prompt": "q0",
        "answer": "a0",
        "reply": "a0",
        "kind": "age",
        "documents_only": True,
        "correct": True,
        "declined": False,
        "finished": True,
    }


def test_every_question_is_asked_once_and_greedily() -> None:
    score, parrot = run()
    assert len(parrot.requests) == 8
    assert all(request.sampling.temperature == 0 for request in parrot.requests)
    assert [reply["prompt"] for reply in score["replies"]] == [f"q{n}" for n in range(8)]


def test_a_share_of_nothing_is_none() -> None:
    exam = Exam((example(4, SUMS, "sum"),))
    engine = cast(Engine, Parrot(REPLIES))
    found = run_quiz(engine, cast(Tokenizer, Letters()), exam)
    assert found["documents_only"] is None
    assert found["unknown_declined"] is None
    assert found["unknown_declined_n"] == 0
    with pytest.raises(ValueError, match="no examples"):
        run_quiz(engine, cast(Tokenizer, Letters()), Exam(()))
