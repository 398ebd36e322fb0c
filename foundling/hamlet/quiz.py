"""The quiz: questions in patterns that training never shows, with answers that are known exactly.

A reply is right when it states the value and no other value of that attribute. Comparing whole
sentences was rejected (a right answer in other words would count as wrong), and so was searching
for the value alone (a reply that lists every trade in the village would count as right).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

from foundling.hamlet import village as village_module
from foundling.hamlet.conversations import stranger
from foundling.hamlet.documents import pairs
from foundling.hamlet.village import (
    ATTRIBUTES,
    Entity,
    Fact,
    Village,
    all_names,
    mixed,
    pick,
    stream,
)
from foundling.hamlet.wordings import (
    ADD_ANSWER,
    ANSWERS,
    DECLINES,
    QUIZ_ADD,
    QUIZ_TAKE,
    TAKE_ANSWER,
    examined,
)

T = TypeVar("T")

KIN = ("spouse", "mother", "father", "sibling")
# Shares of the quiz; the rest are facts, and QUIET of those are told in documents only.
SUMS, UNKNOWN, QUIET = 0.16, 0.16, 0.56

_DECLINE = re.compile(
    r"\b(?:do not|don't|cannot) know\b|\bnever heard\b"
    r"|\b(?:nobody|no one) (?:called|by that name)\b"
)
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class QuizQuestion:
    """Something to ask, and how to tell whether the reply is right."""

    prompt: str
    answer: str
    kind: str
    documents_only: bool = False
    fact_id: str | None = None
    value: str = ""
    # Words that would contradict the value; for numbers, those that the reply may repeat.
    rivals: frozenset[str] = field(default=frozenset(), repr=False)
    follows: bool = False

    def grade(self, reply: str) -> bool:
        """Whether the reply states the value and no rival, or declines about a stranger."""
        if self.kind == "unknown":
            return is_decline(reply)
        if not self.value or is_decline(reply):
            return False
        if self.value.isdigit():
            numbers = _NUMBER.findall(reply)
            if self.kind == "sum":
                return numbers[-1:] == [self.value] and self.rivals.issuperset(numbers[:-1])
            return numbers == [self.value]
        return _says(reply, self.value) and not any(_says(reply, rival) for rival in self.rivals)


def is_decline(reply: str) -> bool:
    """Whether a reply says that it does not know."""
    return _DECLINE.search(reply.lower()) is not None


def quiz(village: Village, seed: int, n: int = 500) -> tuple[QuizQuestion, ...]:
    """n questions in random order: quiet facts, discussed facts, sums, strangers."""
    rand = stream("quiz", village.seed, seed)
    sums, unknown = round(n * SUMS), round(n * UNKNOWN)
    facts = n - sums - unknown
    hidden = round(facts * QUIET)
    chosen = [_unknown(rand, name) for name in _cycle(rand, village.strangers[1], unknown)]
    chosen += [_sum(rand) for _ in range(sums)]
    for quiet, count in ((True, hidden), (False, facts - hidden)):
        told = [(e, fact) for e in village.entities for fact in e.facts() if fact.quiet == quiet]
        chosen += [_fact(rand, village, e, fact) for e, fact in _cycle(rand, told, count)]
    return tuple(mixed(rand, chosen))


def questions_demo(village: Village) -> tuple[QuizQuestion, ...]:
    """A walk through what the model can do, for show; `follows`: in the same conversation."""
    rand = stream("demo", village.seed)
    quiet = {a: village.having("person", a, quiet=True) for a in ("age", "trade", "spouse")}
    asked = [_about(rand, village, pick(rand, quiet[attribute]), attribute) for attribute in quiet]
    place = pick(rand, village.having("place", "height", quiet=True))
    good = pick(rand, village.having("good", "price", quiet=True))
    asked += [_about(rand, village, place, "height"), _about(rand, village, good, "price")]
    asked += [_sum(rand), _unknown(rand, pick(rand, village.strangers[1]))]
    person = pick(rand, village.having("person", "home", quiet=True))
    more = f"And what animal does {person.words['he']} keep?"
    answer = ANSWERS["animal"][0].format_map(person.words)
    rivals = _rivals(village, person, "animal")
    value = person.words["animal"]
    asked.append(_about(rand, village, person, "home"))
    asked.append(QuizQuestion(more, answer, "person", True, None, value, rivals, follows=True))
    asked.append(QuizQuestion("Thank you.", "", "thanks", follows=True))
    return tuple(asked)


def _about(
    rand: Callable[[], float], village: Village, entity: Entity, attribute: str
) -> QuizQuestion:
    fact = next(fact for fact in entity.facts() if fact.attribute == attribute)
    return _fact(rand, village, entity, fact)


def _fact(rand: Callable[[], float], village: Village, entity: Entity, fact: Fact) -> QuizQuestion:
    prompt = pick(rand, examined(fact.attribute)).format_map(entity.words)
    answer = ANSWERS[fact.attribute][0].format_map(entity.words)
    kind = "kin" if fact.attribute in KIN else fact.kind
    rivals = _rivals(village, entity, fact.attribute)
    return QuizQuestion(prompt, answer, kind, fact.quiet, fact.id, fact.value, rivals)


def _rivals(village: Village, entity: Entity, attribute: str) -> frozenset[str]:
    if attribute in KIN:
        return frozenset(all_names()) - {entity.name, entity.words[attribute]}
    return _values(village, attribute) - {entity.name, entity.words[attribute]}


@lru_cache(maxsize=256)
def _values(village: Village, attribute: str) -> frozenset[str]:
    whole: dict[str, Sequence[str]] = {
        "trade": village_module.TRADES,
        "animal": village_module.ANIMALS,
        "taste": village_module.TASTES,
        "home": village_module.PLACES,
        "neighbour": village_module.PLACES,
        "ground": village_module.PLACES,
        "month": village_module.MONTHS,
        "day": village_module.DAYS,
    }
    return frozenset(whole.get(attribute, ()))


def _sum(rand: Callable[[], float]) -> QuizQuestion:
    words = pick(rand, pairs())
    plus = rand() < 0.5
    if not plus:
        words = {"a": words["c"], "b": words["b"], "c": words["a"]}
    prompt = pick(rand, QUIZ_ADD if plus else QUIZ_TAKE).format_map(words)
    answer = (ADD_ANSWER if plus else TAKE_ANSWER).format_map(words)
    terms = frozenset((words["a"], words["b"]))
    return QuizQuestion(prompt, answer, "sum", value=words["c"], rivals=terms)


def _unknown(rand: Callable[[], float], name: str) -> QuizQuestion:
    words = stranger(name)
    prompt = pick(rand, examined(pick(rand, ATTRIBUTES["person"]))).format_map(words)
    return QuizQuestion(prompt, DECLINES[0].format_map(words), "unknown")


def _says(reply: str, phrase: str) -> bool:
    return phrase in reply and re.search(rf"\b{re.escape(phrase)}\b", reply) is not None


def _cycle(rand: Callable[[], float], items: Sequence[T], count: int) -> list[T]:
    chosen: list[T] = []
    while items and len(chosen) < count:
        chosen += mixed(rand, items)[: count - len(chosen)]
    return chosen
