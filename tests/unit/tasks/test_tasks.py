"""The quiz as a task, and the score with its error."""

import json
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundling.tasks.base import Score, Task
from foundling.tasks.hamlet_quiz import FACTS, SUMS, UNKNOWN, HamletQuiz


@pytest.fixture(scope="module")
def quiz() -> HamletQuiz:
    return HamletQuiz(village_seed=3, seed=5, n=200)


def test_a_quiz_is_a_task_and_always_the_same(quiz: HamletQuiz) -> None:
    task: Task = quiz
    assert task.name == "hamlet-quiz"
    assert len(task.examples()) == 200
    assert HamletQuiz(village_seed=3, seed=5, n=200).examples() == quiz.examples()
    assert HamletQuiz(village_seed=3, seed=6, n=200).examples() != quiz.examples()
    assert HamletQuiz(village_seed=4, seed=5, n=200).examples() != quiz.examples()


def test_the_true_answer_is_graded_right_and_an_empty_one_wrong(quiz: HamletQuiz) -> None:
    for example in quiz.examples():
        grade = quiz.grade(example, example.answer)
        assert grade.correct
        assert grade.reward == 1.0
        assert grade.declined == (example.group == UNKNOWN)
        assert not quiz.grade(example, "").correct


def test_a_decline_is_right_for_strangers_only(quiz: HamletQuiz) -> None:
    for example in quiz.examples():
        grade = quiz.grade(example, "I am sorry, I do not know anyone called that.")
        assert grade.declined
        assert grade.correct == (example.group == UNKNOWN)


def test_groups_cover_the_quiz_and_documents_only_is_half_of_the_facts(quiz: HamletQuiz) -> None:
    groups = [example.group for example in quiz.examples()]
    assert set(groups) == {FACTS, SUMS, UNKNOWN}
    hidden = [example for example in quiz.examples() if example.documents_only]
    assert {example.group for example in hidden} == {FACTS}
    assert len(hidden) >= groups.count(FACTS) / 2


def test_examples_are_conversations_of_one_question(quiz: HamletQuiz) -> None:
    for example in quiz.examples():
        (message,) = example.messages
        assert message["role"] == "user"
        assert message["content"]


@given(st.integers(0, 500), st.integers(1, 500))
def test_a_share_has_the_binomial_error(right: int, n: int) -> None:
    right = min(right, n)
    score = Score.of_share("x", right, n)
    assert score is not None
    assert score.value * n == pytest.approx(right)
    outcomes = [1.0] * right + [0.0] * (n - right)
    variance = sum((value - score.value) ** 2 for value in outcomes) / n
    assert score.stderr == pytest.approx(math.sqrt(variance / n), abs=1e-12)
    assert json.loads(json.dumps(score.to_json())) == score.to_json()


def test_a_share_of_nothing_is_no_score() -> None:
    assert Score.of_share("x", 0, 0) is None


def test_tasks_do_not_load_torch() -> None:
    code = "import sys, foundling.tasks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
