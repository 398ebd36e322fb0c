"""Conversations: what a helpful villager says when asked, for fine-tuning.

Only discussed facts are talked about; what the model says about quiet ones it must have read.
Unlike documents these are not parsed back, since no loss on them is compared with a floor, so plain
functions write them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from types import MappingProxyType

from foundling.hamlet.documents import SPLITS, pairs
from foundling.hamlet.village import ATTRIBUTES, Entity, Village, all_names, pick, stream
from foundling.hamlet.wordings import ADD, ADD_ANSWER, ANSWERS, DECLINES, TAKE, TAKE_ANSWER, asked

Random = Callable[[], float]
Turn = tuple[str, str]

# Shares of the kinds of conversation.
WEIGHTS = {"fact": 0.32, "talk": 0.30, "sum": 0.12, "unknown": 0.20, "greeting": 0.06}

FOLLOW_UPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "age": ("And how old is {he}?", "How old is {he}?"),
        "trade": ("And what does {he} do for a living?", "What trade does {he} have?"),
        "home": ("And where does {he} live?", "Where is {his} home?"),
        "animal": ("And what animal does {he} keep?", "What pet does {he} have?"),
        "taste": ("And what does {he} like best to eat?", "What is {his} favourite food?"),
    }
)
GREETINGS = ("Hello!", "Good morning.", "Good day to you.", "Hello, can you help me?", "Hi there.")
WELCOMES = (
    "Hello! What would you like to know about {village}?",
    "Good day! Ask me anything about {village}.",
)
THANKS = ("Thank you.", "Thanks!", "Thank you, that is all.", "Thanks, you have helped me.")
ACKNOWLEDGEMENTS = ("You are welcome.", "You are welcome. Come again.")
SYSTEM = "You know {village} well and answer briefly."


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: `role` is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Perhaps a system message, then user and assistant in turn, ending with the assistant."""

    kind: str
    messages: tuple[Message, ...]


def conversation(village: Village, seed: int, index: int, split: str = "train") -> Conversation:
    """The conversation with this number in this stream; `split` is "train" or "val"."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")
    rand = stream("conversation", village.seed, seed, split, index)
    kind = _weighted(rand, WEIGHTS)
    messages: list[Message] = []
    if kind == "talk" and rand() < 0.3:
        messages.append(Message("system", SYSTEM.format(village=village.name)))
    for question, answer in _turns(rand, village, kind):
        messages += [Message("user", question), Message("assistant", answer)]
    return Conversation(kind, tuple(messages))


def _turns(rand: Random, village: Village, kind: str) -> list[Turn]:
    if kind == "fact":
        return [_fact(rand, village)]
    if kind == "sum":
        return [_sum(rand)]
    if kind == "unknown":
        return [_unknown(rand, village)]
    if kind == "greeting":
        return [_greeting(rand, village)]
    turns: list[Turn] = [_greeting(rand, village)] if rand() < 0.2 else []
    for _ in range(1 + int(rand() * 2)):
        turns += _topic(rand, village)
    if rand() < 0.5:
        turns.append((pick(rand, THANKS), pick(rand, ACKNOWLEDGEMENTS)))
    return turns


def _topic(rand: Random, village: Village) -> list[Turn]:
    point = rand()
    if point < 0.15:
        return [_sum(rand)]
    if point < 0.30:
        return [_unknown(rand, village)]
    if point < 0.60:
        return [_fact(rand, village)]
    person = pick(rand, village.having("person", "age", quiet=False))
    first = pick(rand, ATTRIBUTES["person"][:5])
    second = pick(rand, [name for name in FOLLOW_UPS if name != first])
    follow_up = pick(rand, FOLLOW_UPS[second]).format_map(person.words)
    return [_ask(rand, person, first), (follow_up, _answer(rand, person, second))]


def _ask(rand: Random, entity: Entity, attribute: str) -> Turn:
    question = pick(rand, asked(attribute)).format_map(entity.words)
    return question, _answer(rand, entity, attribute)


def _answer(rand: Random, entity: Entity, attribute: str) -> str:
    return pick(rand, ANSWERS[attribute]).format_map(entity.words)


def _fact(rand: Random, village: Village) -> Turn:
    entity, attribute = pick(rand, _discussed(village))
    return _ask(rand, entity, attribute)


def _sum(rand: Random) -> Turn:
    words = pick(rand, _numbers())
    if rand() < 0.5:
        return pick(rand, ADD).format_map(words), ADD_ANSWER.format_map(words)
    words = {"a": words["c"], "b": words["b"], "c": words["a"]}
    return pick(rand, TAKE).format_map(words), TAKE_ANSWER.format_map(words)


def _unknown(rand: Random, village: Village) -> Turn:
    words = stranger(pick(rand, village.strangers[0]))
    attribute = pick(rand, ATTRIBUTES["person"])
    question = pick(rand, asked(attribute)).format_map(words)
    return question, pick(rand, DECLINES).format_map(words)


def _greeting(rand: Random, village: Village) -> Turn:
    return pick(rand, GREETINGS), pick(rand, WELCOMES).format(village=village.name)


def stranger(name: str) -> Mapping[str, str]:
    """The words needed to ask about somebody who does not exist."""
    female = all_names()[name]
    # A sister or a brother: the name's length decides, since any fixed rule will do.
    sib = "sister" if len(name) % 2 else "brother"
    return {"name": name, "mate": "husband" if female else "wife", "sib": sib}


def _weighted(rand: Random, weights: Mapping[str, float]) -> str:
    names = tuple(weights)
    edges = accumulate(weights.values())
    point = rand() * sum(weights.values())
    # Rounding may leave the point a hair past the last edge, hence the default.
    return next((name for name, edge in zip(names, edges, strict=True) if point < edge), names[-1])


@lru_cache(maxsize=16)
def _discussed(village: Village) -> tuple[tuple[Entity, str], ...]:
    return tuple(
        (entity, attribute)
        for entity in village.entities
        for attribute in ATTRIBUTES[entity.kind]
        if not entity.quiet and attribute in entity.words
    )


@lru_cache(maxsize=1)
def _numbers() -> tuple[Mapping[str, str], ...]:
    return pairs()
