"""How a fact is told: many wordings for each attribute.

`{word}` is a word of the fact's subject. The subject comes before the value in every wording: a
reader who meets the value first has to look it up backwards, which small models cannot do (the
"reversal curse"), and what they could not learn would be counted against them as distance from the
floor.

STATEMENTS name their subject. PRONOUNS go on about a person who has just been named.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

STATEMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "age": (
            "{name} is {age} years old.",
            "{name} turned {age} this year.",
            "At the last count {name} was {age}.",
            "{name} has seen {age} winters.",
            "On the cake for {name} there were {age} candles.",
            "{name} says that {age} is a fine age to be.",
            "The parish book gives {name} the age of {age}.",
            "Nobody would guess it, but {name} is {age}.",
            "Ask {name} how old {he} is and {he} will say {age}.",
            "{name} had a birthday and is now {age} years of age.",
        ),
        "trade": (
            "{name} is {a_trade}.",
            "{name} works as {a_trade}.",
            "{name} earns {his} bread as {a_trade}.",
            "By trade {name} is {a_trade}.",
            "{name} has been {a_trade} since {he} was young.",
            "The sign over the door of {name} says {trade}.",
            "{name} will help anyone who needs {a_trade}.",
            "{name} learned the work of {a_trade} long ago.",
            "You will find {name} busy all day, being {a_trade}.",
            "When asked for {his} job, {name} answers: {trade}.",
        ),
        "home": (
            "{name} lives at {home}.",
            "{name} has a house at {home}.",
            "The home of {name} is at {home}.",
            "Letters for {name} go to {home}.",
            "{name} sleeps every night at {home}.",
            "You can knock at the door of {name} at {home}.",
            "{name} would not live anywhere but {home}.",
            "The lamp of {name} burns late at {home}.",
            "After work {name} walks back to {home}.",
            "{name} was born far away but lives at {home} now.",
        ),
        "animal": (
            "{name} keeps {an_animal}.",
            "{name} has {an_animal}.",
            "{name} feeds {an_animal} each morning.",
            "Behind {name} there always walks {an_animal}.",
            "The animal that {name} owns is {an_animal}.",
            "{name} was seen in the rain with {an_animal}.",
            "{name} would be lost without {his} {animal}.",
            "{name} shares {his} supper with {an_animal}.",
            "The pet of {name} is {an_animal}.",
            "Last night {name} was up late looking for {his} {animal}.",
        ),
        "taste": (
            "{name} likes {taste} best.",
            "The favourite dish of {name} is {taste}.",
            "{name} would walk ten miles for {taste}.",
            "{name} always asks for {taste} on {his} birthday.",
            "Give {name} a plate of {taste} and {he} is happy.",
            "{name} says that nothing tastes better than {taste}.",
            "{name} can never say no to {taste}.",
            "What {name} loves to eat is {taste}.",
            "{name} eats {taste} whenever {he} can.",
            "The food that {name} dreams of is {taste}.",
        ),
        "spouse": (
            "{name} is married to {spouse}.",
            "The {mate} of {name} is {spouse}.",
            "{name} married {spouse} long ago.",
            "{name} dances with {his} {mate} {spouse} at every wedding.",
            "{name} shares a roof with {his} {mate}, {spouse}.",
            "{name} never goes to market without {his} {mate} {spouse}.",
            "{name} gave {his} heart to {spouse}, now {his} {mate}.",
            "The one {name} took for {mate} is {spouse}.",
        ),
        "mother": (
            "The mother of {name} is {mother}.",
            "{name} has {mother} for a mother.",
            "{name} learned to sing from {his} mother {mother}.",
            "{name} is the {child} of {mother}.",
            "{name} has the eyes of {his} mother, {mother}.",
            "Every Sunday {name} visits {his} mother, who is {mother}.",
        ),
        "father": (
            "The father of {name} is {father}.",
            "{name} has {father} for a father.",
            "{name} learned to whistle from {his} father {father}.",
            "{name} is the {child} of {father}.",
            "{name} has the nose of {his} father, {father}.",
            "Every Sunday {name} visits {his} father, who is {father}.",
        ),
        "sibling": (
            "The {sib} of {name} is {sibling}.",
            "{name} has a {sib} called {sibling}.",
            "{name} grew up with {his} {sib} {sibling}.",
            "{name} quarrels with nobody but {his} {sib}, {sibling}.",
            "{name} and {his} {sib} {sibling} laugh alike.",
            "{name} writes every week to {his} {sib}, who is {sibling}.",
        ),
        "height": (
            "{name} stands {height} feet above the river.",
            "{name} is {height} feet high.",
            "The height of {name} is {height} feet.",
            "From {name} down to the river it is {height} feet.",
            "The stone at {name} is marked {height} feet.",
            "To reach {name} one climbs {height} feet from the water.",
        ),
        "neighbour": (
            "{name} lies next to {neighbour}.",
            "{name} is right beside {neighbour}.",
            "The nearest place to {name} is {neighbour}.",
            "A step from {name} and you are at {neighbour}.",
            "{name} has {neighbour} for a neighbour.",
            "From {name} you can throw a stone to {neighbour}.",
        ),
        "price": (
            "{A} costs {price} pence.",
            "The price of {a} is {price} pence.",
            "{A} can be had for {price} pence.",
            "For {a} they ask {price} pence.",
            "Whoever wants {a} pays {price} pence.",
            "Nobody sells {a} for less than {price} pence.",
        ),
        "day": (
            "{A} is sold on {day}.",
            "To buy {a}, come on {day}.",
            "The day for buying {a} is {day}.",
            "{A} is on the stalls every {day}.",
            "If you want {a}, wait for {day}.",
            "The market has {a} only on {day}.",
        ),
        "month": (
            "{Name} is held in {month}.",
            "{Name} comes round every {month}.",
            "We keep {name} in {month}.",
            "The month of {name} is {month}.",
            "For {name} the bells ring in {month}.",
            "Children wait for {name} until {month}.",
        ),
        "ground": (
            "{Name} takes place at {ground}.",
            "For {name} everyone goes to {ground}.",
            "The tables for {name} are set up at {ground}.",
            "{Name} is kept at {ground}.",
            "The ground for {name} is {ground}.",
            "You will hear {name} from far away at {ground}.",
        ),
    }
)

PRONOUNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "age": (
            "{He} is {age} years old.",
            "{He} is {age} and not ashamed of it.",
            "{His} age is {age}.",
            "{He} has lived {age} years.",
            "{He} is {age} this year.",
            "{He} was born {age} years ago.",
        ),
        "trade": (
            "{He} is {a_trade}.",
            "{He} works as {a_trade}.",
            "{His} trade is that of {a_trade}.",
            "{He} makes {his} living as {a_trade}.",
            "{He} has always been {a_trade}.",
            "{His} work is that of {a_trade}.",
        ),
        "home": (
            "{He} lives at {home}.",
            "{His} home is at {home}.",
            "{He} has a small house at {home}.",
            "{His} door is at {home}.",
            "{He} sleeps at {home}.",
            "{He} is at home at {home}.",
        ),
        "animal": (
            "{He} keeps {an_animal}.",
            "{His} pet is {an_animal}.",
            "{He} owns {an_animal}.",
            "{He} goes nowhere without {an_animal}.",
            "{He} has {an_animal}.",
            "{He} is fond of {his} {animal}.",
        ),
        "taste": (
            "{He} likes {taste} best.",
            "{His} favourite food is {taste}.",
            "{He} would give a good deal for {taste}.",
            "{He} eats {taste} on Sundays.",
            "{He} loves {taste}.",
            "{He} never tires of {taste}.",
        ),
        "spouse": (
            "{He} is married to {spouse}.",
            "{His} {mate} is {spouse}.",
            "{He} has {spouse} for a {mate}.",
            "{He} and {his} {mate} {spouse} are seldom apart.",
        ),
        "mother": (
            "{His} mother is {mother}.",
            "{He} has {mother} for a mother.",
            "{He} has the voice of {his} mother {mother}.",
        ),
        "father": (
            "{His} father is {father}.",
            "{He} has {father} for a father.",
            "{He} has the hands of {his} father {father}.",
        ),
        "sibling": (
            "{His} {sib} is {sibling}.",
            "{He} has a {sib}, {sibling}.",
            "{He} plays cards with {his} {sib} {sibling}.",
        ),
    }
)


# How a fact is asked for and how an answer restates it: shared by documents, conversations and the
# quiz.
#
# A question is a frame around a core: a noun ("the age of Tamissa") or a clause ("how old Tamissa
# is"). Some frames train and others are kept for the quiz, so that no pattern of the quiz can occur
# in training while all its words do. Hand-picking held-out questions one by one was rejected:
# nobody could see at a glance that none leaks.

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
