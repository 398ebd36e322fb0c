"""The quiz asks in new patterns made of known words, and grades strictly."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from foundling.hamlet import village as village_module
from foundling.hamlet.conversations import conversation
from foundling.hamlet.documents import document
from foundling.hamlet.quiz import QuizQuestion, is_decline, questions_demo, quiz
from foundling.hamlet.village import Village, all_names


@pytest.fixture(scope="module")
def village() -> Village:
    return Village(3)


@pytest.fixture(scope="module")
def questions(village: Village) -> tuple[QuizQuestion, ...]:
    return quiz(village, 3, 500)


@pytest.fixture(scope="module")
def training(village: Village) -> list[str]:
    texts = [document(village, 3, index).text for index in range(6000)]
    for index in range(6000):
        texts += [message.content for message in conversation(village, 3, index).messages]
    return texts


def masked(text: str) -> str:
    """The pattern of a text: names and values become one sign, capitals do not count."""
    names = set(all_names())
    text = re.sub(r"\w+", lambda word: "_" if word[0] in names else word[0], text)
    phrases = (*village_module.PLACES, *village_module.GOODS, *village_module.FEASTS)
    pattern = "|".join(sorted(map(re.escape, phrases), key=len, reverse=True))
    return re.sub(r"\d+", "_", re.sub(pattern, "_", text)).lower()


def test_shares(questions: tuple[QuizQuestion, ...]) -> None:
    facts = [q for q in questions if q.fact_id]
    assert len(questions) == 500
    assert sum(q.documents_only for q in facts) >= len(facts) / 2
    assert sum(q.kind == "unknown" for q in questions) >= 60
    assert sum(q.kind == "sum" for q in questions) >= 60
    assert {q.kind for q in questions} == {
        *("person", "kin", "place", "good", "feast", "sum", "unknown")
    }


def test_no_pattern_of_the_quiz_occurs_in_training(
    village: Village, questions: tuple[QuizQuestion, ...], training: list[str]
) -> None:
    corpus = "\n".join(map(masked, training))
    patterns = {masked(q.prompt) for q in (*questions, *quiz(village, 4, 2000))}
    assert len(patterns) > 60
    assert [pattern for pattern in patterns if pattern in corpus] == []


def test_every_word_of_the_quiz_occurs_in_training(
    questions: tuple[QuizQuestion, ...], training: list[str]
) -> None:
    words = set(re.findall(r"[\w']+", "\n".join(training)))
    strangers = set(all_names())
    for question in questions:
        for word in re.findall(r"[\w']+", question.prompt):
            assert word in words or word.removesuffix("'s") in words | strangers, question.prompt


def test_documents_only_facts_are_never_asked_about_in_training(
    village: Village, questions: tuple[QuizQuestion, ...], training: list[str]
) -> None:
    quiet = {fact.id: fact for fact in village.facts() if fact.quiet}
    # Documents mark their questions; in conversations every message of the user is one.
    marked = [line.split(" Answer: ")[0] for text in training for line in text.split("\n")]
    asked = [line for line in marked if line.startswith("Question: ")]
    for index in range(6000):
        asked += [m.content for m in conversation(village, 3, index).messages if m.role == "user"]
    mentioned = set(re.findall(r"[\w']+", "\n".join(asked)))
    people = {person.name for person in village.people if person.quiet}
    assert not mentioned & (people | {f"{name}'s" for name in people})
    for question in questions:
        assert question.documents_only == (question.fact_id in quiet)
    others = [fact.subject for fact in quiet.values() if fact.kind != "person"]
    heard = "\n".join(asked)
    assert [subject for subject in others if subject in heard] == []


def test_its_own_answers_are_right_and_other_peoples_are_wrong(
    questions: tuple[QuizQuestion, ...],
) -> None:
    assert all(question.grade(question.answer) for question in questions)
    for one, other in pairwise(questions):
        if one.kind != "unknown" and one.value != other.value:
            assert not one.grade(other.answer)


def test_grading_is_strict(village: Village) -> None:
    by_attribute = {q.fact_id.split("/")[2]: q for q in quiz(village, 5, 800) if q.fact_id}
    age, trade, spouse = (by_attribute[a] for a in ("age", "trade", "spouse"))
    assert not age.grade(age.answer + " Or 3.")
    assert not trade.grade(" ".join(village_module.TRADES))
    assert not trade.grade("")
    assert not trade.grade("I do not know, perhaps " + trade.value)
    rival = next(name for name in spouse.rivals)
    assert spouse.grade(f"That would be {spouse.value}.")
    assert not spouse.grade(f"{spouse.value} or {rival}.")
    assert not spouse.grade(spouse.value + "x")


def test_sums_are_graded_by_their_last_number(questions: tuple[QuizQuestion, ...]) -> None:
    question = next(q for q in questions if q.kind == "sum")
    assert question.grade(question.value)
    assert not question.grade(question.value + " or 1000")
    assert not question.grade("1000 " + question.value)
    assert not question.grade(question.value + "0")


@pytest.mark.parametrize(
    ("reply", "declines"),
    [
        ("I do not know anyone called Ann.", True),
        ("I'm sorry, I don't know.", True),
        ("There is nobody called Ann here.", True),
        ("Ann is 42 years old.", False),
        ("You know Ann, she is a baker.", False),
        ("", False),
    ],
)
def test_declining(reply: str, declines: bool) -> None:
    assert is_decline(reply) is declines


def test_unknown_people_are_unknown_everywhere(
    village: Village, questions: tuple[QuizQuestion, ...], training: list[str]
) -> None:
    corpus = set(re.findall(r"\w+", "\n".join(training)))
    for question in questions:
        if question.kind == "unknown":
            names = set(re.findall(r"\w+", question.prompt)) & set(all_names())
            assert names
            assert not names & corpus


def test_the_demo_shows_every_side(village: Village) -> None:
    shown = questions_demo(village)
    assert len(shown) >= 6
    assert {"person", "kin", "place", "good", "sum", "unknown", "thanks"} <= {q.kind for q in shown}
    assert all(q.grade(q.answer) for q in shown if q.answer)
    assert any(q.follows for q in shown)


def test_a_small_village_has_a_full_quiz_too() -> None:
    assert len(quiz(Village(1, people=12), 1, 60)) == 60
