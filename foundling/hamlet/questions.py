"""How a fact is asked for and how an answer restates it: shared by documents, conversations and
the quiz.

A question is a frame around a core: a noun ("the age of Tamissa") or a clause ("how old Tamissa
is"). Some frames train and others are kept for the quiz, so that no pattern of the quiz can occur
in training while all its words do. Hand-picking held-out questions one by one was rejected: nobody
could see at a glance that none leaks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

NOUNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "age": ("the age of {name}", "{name}'s age"),
        "trade": ("the trade of {name}", "{name}'s job"),
        "home": ("the home of {name}", "{name}'s home"),
        "animal": ("the animal of {name}", "{name}'s pet"),
        "taste": ("the favourite food of {name}", "{name}'s favourite dish"),
        "spouse": ("the {mate} of {name}", "{name}'s {mate}"),
        "mother": ("the mother of {name}", "{name}'s mother"),
        "father": ("the father of {name}", "{name}'s father"),
        "sibling": ("the {sib} of {name}", "{name}'s {sib}"),
        "height": ("the height of {name}",),
        "neighbour": ("the neighbour of {name}", "the place beside {name}"),
        "price": ("the price of {a}", "the cost of {a}"),
        "day": ("the market day for {a}", "the day for buying {a}"),
        "month": ("the month of {name}",),
        "ground": ("the ground of {name}",),
    }
)
CLAUSES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "age": ("how old {name} is", "what age {name} is"),
        "trade": (
            "what {name} does for a living",
            "what trade {name} has",
            "what work {name} does",
        ),
        "home": ("where {name} lives", "where the home of {name} is"),
        "animal": ("what animal {name} keeps", "what pet {name} has"),
        "taste": ("what {name} likes best to eat", "what food {name} loves"),
        "spouse": ("who {name} is married to", "who the {mate} of {name} is"),
        "mother": ("who the mother of {name} is", "who {name}'s mother is"),
        "father": ("who the father of {name} is", "who {name}'s father is"),
        "sibling": ("who the {sib} of {name} is", "who {name}'s {sib} is"),
        "height": ("how high {name} is", "how many feet above the river {name} stands"),
        "neighbour": ("what place {name} lies next to", "what is beside {name}"),
        "price": ("what {a} costs", "how many pence {a} costs"),
        "day": ("what day {a} is sold", "when one can buy {a}"),
        "month": ("when {name} is held", "what month {name} is in"),
        "ground": ("where {name} takes place", "where {name} is held"),
    }
)
DIRECT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "age": ("How old is {name}?", "What age is {name}?"),
        "trade": ("What does {name} do for a living?", "What trade does {name} have?"),
        "home": ("Where does {name} live?", "Where is the home of {name}?"),
        "animal": ("What animal does {name} keep?", "What pet does {name} have?"),
        "taste": ("What does {name} like best to eat?", "What food does {name} love?"),
        "spouse": ("Who is {name} married to?", "Who is the {mate} of {name}?"),
        "mother": ("Who is the mother of {name}?", "Who is {name}'s mother?"),
        "father": ("Who is the father of {name}?", "Who is {name}'s father?"),
        "sibling": ("Who is the {sib} of {name}?", "Who is {name}'s {sib}?"),
        "height": ("How high is {name}?", "How many feet above the river is {name}?"),
        "neighbour": ("What place does {name} lie next to?", "What lies beside {name}?"),
        "price": ("What does {a} cost?", "How many pence does {a} cost?"),
        "day": ("What day is {a} sold?", "When can one buy {a}?"),
        "month": ("When is {name} held?", "What month is {name} in?"),
        "ground": ("Where does {name} take place?", "Where is {name} held?"),
    }
)
# Answers never begin with the name: in training only discussed names would stand there, and the
# model would answer with one of those whoever was asked for.
ANSWERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "age": ("{He} is {age} years old.",),
        "trade": ("{He} is {a_trade}.", "{He} works as {a_trade}."),
        "home": ("{He} lives at {home}.",),
        "animal": ("{He} keeps {an_animal}.",),
        "taste": ("{He} likes {taste} best.",),
        "spouse": ("{He} is married to {spouse}.",),
        "mother": ("{His} mother is {mother}.",),
        "father": ("{His} father is {father}.",),
        "sibling": ("{His} {sib} is {sibling}.",),
        "height": ("It stands {height} feet above the river.",),
        "neighbour": ("It lies next to {neighbour}.",),
        "price": ("It costs {price} pence.",),
        "day": ("It is sold on {day}.",),
        "month": ("It is held in {month}.",),
        "ground": ("It takes place at {ground}.",),
    }
)

NOUN_FRAMES = (
    "Tell me {core}.",
    "Can you tell me {core}?",
    "Do you know {core}?",
    "I want to know {core}.",
    "Give me {core}, please.",
    "I forgot {core}.",
    "Please give me {core}.",
    "I cannot remember {core}.",
)
CLAUSE_FRAMES = (
    "Tell me {core}.",
    "Can you tell me {core}?",
    "Do you know {core}?",
    "I want to know {core}.",
    "Say {core}, please.",
    "I wonder {core}.",
    "Please say {core}.",
    "I cannot remember {core}.",
)
QUIZ_NOUN_FRAMES = (
    "Please tell me {core}.",
    "Can you give me {core}?",
    "Do you remember {core}?",
)
QUIZ_CLAUSE_FRAMES = (
    "Please tell me {core}.",
    "Can you say {core}?",
    "Do you remember {core}?",
    "I would like to know {core}.",
)

ADD = (
    "What is {a} plus {b}?",
    "How much is {a} plus {b}?",
    "Add {a} and {b}.",
    "Please say what {a} plus {b} is.",
    "What do {a} and {b} make?",
    "Can you add {a} and {b}?",
    "{a} + {b} = ?",
)
TAKE = (
    "What is {a} minus {b}?",
    "How much is {a} minus {b}?",
    "Take {b} from {a}.",
    "Please say what {a} minus {b} is.",
    "What is left of {a} without {b}?",
    "Can you take {b} from {a}?",
    "{a} - {b} = ?",
)
QUIZ_ADD = (
    "Please add {a} and {b}.",
    "Tell me what {a} plus {b} is.",
    "Do you know how much {a} plus {b} is?",
)
QUIZ_TAKE = (
    "Please take {b} from {a}.",
    "Tell me what {a} minus {b} is.",
    "Do you know how much {a} minus {b} is?",
)
ADD_ANSWER = "{a} plus {b} is {c}."
TAKE_ANSWER = "{a} minus {b} is {c}."

# Without the name: a small model that has to repeat one it has never read gets it wrong.
DECLINES = (
    "I do not know anyone by that name.",
    "I am sorry, I do not know anyone by that name.",
)


def asked(attribute: str) -> tuple[str, ...]:
    """Every question for an attribute that training may show."""
    return DIRECT[attribute] + _framed(attribute, NOUN_FRAMES, CLAUSE_FRAMES)


def examined(attribute: str) -> tuple[str, ...]:
    """Every question for an attribute that the quiz may ask."""
    return _framed(attribute, QUIZ_NOUN_FRAMES, QUIZ_CLAUSE_FRAMES)


def _framed(attribute: str, nouns: tuple[str, ...], clauses: tuple[str, ...]) -> tuple[str, ...]:
    pairs = [(frame, core) for frame in nouns for core in NOUNS[attribute]]
    pairs += [(frame, core) for frame in clauses for core in CLAUSES[attribute]]
    return tuple(frame.replace("{core}", core) for frame, core in pairs)


def about(variable: str, template: str) -> str:
    """The template with its words taken from one variable of a grammar."""
    return re.sub(r"\{(\w+)\}", rf"{{{variable}[\1]}}", template)
