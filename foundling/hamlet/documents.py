"""Documents: what the village writes about itself, each a pure function of (village, seed, index,
split).

A document is one text of the village's grammar, drawn from a stream that its key alone decides: any
index can be made without the ones before it, in any process. Splits are different keys of the same
stream function, so held-out text has the same distribution and none of the same draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from foundling.hamlet import grammar
from foundling.hamlet import village as village_module
from foundling.hamlet.grammar import Any, Derivation, Many, Node, Pick, Seq, Shuffled, Text, Words
from foundling.hamlet.village import ATTRIBUTES, Entity, Village, stream
from foundling.hamlet.wordings import (
    ADD,
    ADD_ANSWER,
    ANSWERS,
    PRONOUNS,
    STATEMENTS,
    TAKE,
    TAKE_ANSWER,
    about,
    asked,
)

SPLITS = ("train", "val")
# How often each kind is written. Questions come to a fifth of the bytes.
WEIGHTS = {
    "gazette": 0.26,
    "letter": 0.10,
    "story": 0.08,
    "portrait": 0.18,
    "ledger": 0.04,
    "prices": 0.04,
    "sums": 0.10,
    "spelling": 0.02,
    "questions": 0.18,
}
KINDS = tuple(WEIGHTS)
LARGEST_TERM = 10


@dataclass(frozen=True, slots=True)
class Document:
    """A text, its kind, and -log2 of the probability that the village writes exactly it."""

    kind: str
    text: str
    bits: float


def document(village: Village, seed: int, index: int, split: str = "train") -> Document:
    """The document with this number in this stream; `split` is "train" or "val"."""
    text, derivation = derive(village, seed, index, split)
    return Document(KINDS[derivation.choices[0]], text, derivation.bits)


def derive(village: Village, seed: int, index: int, split: str = "train") -> tuple[str, Derivation]:
    """The text of a document together with the choices that made it."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")
    return grammar.write(rules(village), stream("document", village.seed, seed, split, index))


def parse(village: Village, text: str) -> list[Derivation]:
    """Every list of choices under which the village writes exactly this text."""
    return grammar.read(rules(village), text)


@lru_cache(maxsize=16)
def rules(village: Village) -> Node:
    """The grammar of all documents of a village."""
    makers = (
        _gazette,
        _letter,
        _story,
        _portrait,
        _ledger,
        _prices,
        _sums,
        _spelling,
        _questions,
    )
    return Any([make(village) for make in makers], list(WEIGHTS.values()))


def pairs() -> tuple[Words, ...]:
    """Every a + b = c of the schoolroom; small enough that all of them are met in training."""
    terms = range(2, LARGEST_TERM + 1)
    return tuple({"a": str(a), "b": str(b), "c": str(a + b)} for a in terms for b in terms)


def _texts(templates: Sequence[str]) -> Node:
    return Any([Text(template) for template in templates])


def _of(entities: Sequence[Entity]) -> list[Words]:
    return [entity.words for entity in entities]


def _named(names: Sequence[str]) -> list[Words]:
    return [{"name": name} for name in names]


def _head(village: Village, templates: Sequence[str]) -> Node:
    """A heading: one of the templates, with the weekday or month drawn where it shows one."""
    nodes: list[Node] = []
    for template in templates:
        node: Node = Text(template.replace("{o[name]}", village.name))
        if "{m[" in template:
            node = Pick("m", _named(village_module.MONTHS), node)
        if "{w[" in template:
            node = Pick("w", _named(village_module.DAYS), node)
        nodes.append(node)
    return Any(nodes)


def _statement(village: Village) -> Node:
    """One fact of the village told in one sentence; facts are about equally likely."""
    nodes: list[Node] = []
    weights: list[float] = []
    for kind, attributes in ATTRIBUTES.items():
        for attribute in attributes:
            holders = village.having(kind, attribute)
            if holders:
                told = _texts([about("x", wording) for wording in STATEMENTS[attribute]])
                nodes.append(Pick("x", _of(holders), told))
                weights.append(float(len(holders)))
    return Any(nodes, weights)


def _gazette(village: Village) -> Node:
    notes = Many(3, 7, Any([_statement(village), _guests(village)], [0.85, 0.15]), " ")
    return Seq(_head(village, GAZETTE_HEADS), Text(" "), _texts(WEATHER), Text(" "), notes)


def _guests(village: Village) -> Node:
    """Two to four different people named in a row."""
    people = _of(village.people)
    heads: list[Node] = []
    for template in GUESTS:
        node: Node = Text(template)
        if "{l[" in template:
            node = Pick("l", _of(village.places), node)
        if "{w[" in template:
            node = Pick("w", _named(village_module.DAYS), node)
        heads.append(node)
    rows: list[Node] = []
    for guests in ("pq", "pqr", "pqrt"):
        names = ", ".join(f"{{{guest}[name]}}" for guest in guests)
        row: Node = Text(f"{names}.")
        for at in reversed(range(len(guests))):
            row = Pick(guests[at], people, row, unlike=guests[:at])
        rows.append(row)
    return Seq(Any(heads), Any(rows))


def _ledger(village: Village) -> Node:
    line = Pick("p", _of(village.people), _texts(LEDGER_LINES))
    return Seq(_head(village, LEDGER_HEADS), Text("\n"), Many(3, 8, line, "\n"))


def _letter(village: Village) -> Node:
    gossip = Seq(_texts(GOSSIP), Text(" "), _statement(village), Text(" "))
    body = Seq(
        *(_texts(LETTER_HEADS), Text(" "), _texts(LETTER_SELF), Text(" ")),
        *(_texts(LETTER_YOU), Text(" "), Many(1, 3, gossip, "")),
        _texts(LETTER_ENDS),
    )
    people = _of(village.people)
    return Pick("p", people, Pick("q", people, body, unlike=["p"]))


def _story(village: Village) -> Node:
    people = _of(village.people)
    wants = Pick("g", _of(village.goods), _texts(STORY_WANTS))
    meets = Pick("q", people, _texts(STORY_MEETS), unlike=["p"])
    talks: list[Node] = []
    for template in STORY_TALKS:
        feast = "{f[" in template
        values = _of(village.feasts if feast else village.places)
        talks.append(Pick("f" if feast else "l", values, Text(template)))
    body = Seq(
        *(_texts(STORY_HEADS), Text(" "), wants, Text(" "), meets, Text(" ")),
        *(Any(talks), Text(" "), _texts(STORY_ENDS)),
    )
    return Pick("p", people, body)


def _portrait(village: Village) -> Node:
    """All that is known of a person, in any order: what a fact follows must not give it away."""
    return Any([Pick("p", [person.words], _told(person)) for person in village.people])


def _told(person: Entity) -> Node:
    known = [attribute for attribute in PRONOUNS if attribute in person.words]
    lines = [_texts([about("p", line) for line in PRONOUNS[attribute]]) for attribute in known]
    return Seq(Text("About {p[name]}. "), Shuffled(lines, " "))


def _prices(village: Village) -> Node:
    line = Pick("g", _of(village.goods), _texts(PRICE_LINES))
    return Seq(_head(village, PRICE_HEADS), Text("\n"), Many(4, 8, line, "\n"))


def _sums(village: Village) -> Node:
    people, numbers = _of(village.people), pairs()
    lines: list[Node] = []
    for template in SUM_LINES + TAKE_LINES:
        line: Node = Pick("s", numbers, Text(template))
        lines.append(Pick("p", people, line) if "{p[" in template else line)
    return Seq(_head(village, SUM_HEADS), Text("\n"), Many(4, 8, Any(lines), "\n"))


def _spelling(village: Village) -> Node:
    spelt = [{"name": p.name, "letters": "-".join(p.name)} for p in village.people]
    line = Pick("p", spelt, _texts(SPELLING_LINES))
    return Seq(_head(village, SPELLING_HEADS), Text("\n"), Many(3, 5, line, "\n"))


def _questions(village: Village) -> Node:
    """Questions about discussed facts, and sums, each answered at once."""
    nodes: list[Node] = []
    weights: list[float] = []
    for kind, attributes in ATTRIBUTES.items():
        for attribute in attributes:
            holders = village.having(kind, attribute, quiet=False)
            if holders:
                nodes.append(_exchange(_of(holders), asked(attribute), ANSWERS[attribute]))
                weights.append(max(10.0, float(len(holders))))
    numbers = pairs()
    takes = [{"a": s["c"], "b": s["b"], "c": s["a"]} for s in numbers]
    nodes += [_exchange(numbers, ADD, (ADD_ANSWER,)), _exchange(takes, TAKE, (TAKE_ANSWER,))]
    weights += [40.0, 40.0]
    return Seq(_head(village, ASK_HEADS), Text("\n"), Many(3, 6, Any(nodes, weights), "\n"))


def _exchange(values: Sequence[Words], questions: Sequence[str], answers: Sequence[str]) -> Node:
    ask = _texts([f"Question: {about('x', question)}" for question in questions])
    answer = _texts([f" Answer: {about('x', answer)}" for answer in answers])
    return Pick("x", values, Seq(ask, answer))


# The set pieces of letters, stories, lists, sums and spellings, as templates.
#
# Variables: `p` and `q` people, `g` a good, `f` a feast, `l` a place, `s` a pair of numbers, `w` a
# weekday, `m` a month, `o` the village. Each group below is one choice; what is free (weather, a
# turn of phrase) is drawn from a short list, so that nothing in a document is noise that no model
# could learn the odds of.

GAZETTE_HEADS = (
    "The {o[name]} Gazette, a {w[name]} in {m[name]}.",
    "News of {o[name]}, {m[name]}, written on a {w[name]}.",
    "{o[name]} Notes for {w[name]}, {m[name]}.",
    "From the notice board of {o[name]}, one {w[name]} in {m[name]}.",
)
WEATHER = (
    "It rained until noon.",
    "The river is high.",
    "The sun shone on the roofs.",
    "A thick fog lay over the fields.",
    "The wind took two hats and a gate.",
    "There was frost on the pump.",
    "It was a mild and quiet day.",
    "Thunder was heard behind the hill.",
)

# Guests are `p`, `q`, `r`, `t` in this order, and all different.
GUESTS = (
    "Seen at {l[name]}: ",
    "At the well: ",
    "Late for church: ",
    "Winners at cards: ",
    "Dancing on {w[name]}: ",
    "Thanked for their help: ",
    "New in the choir: ",
    "Away on a journey: ",
)

LEDGER_HEADS = (
    "Parish ledger of {o[name]}, {m[name]}.",
    "The book of households, copied in {m[name]}.",
    "Counted from door to door on a {w[name]}.",
    "People of {o[name]}, as the clerk wrote them down.",
)
LEDGER_LINES = (
    "{p[name]}, {p[age]}, {p[trade]}, {p[home]}.",
    "{p[name]}, {p[trade]}, aged {p[age]}.",
    "{p[name]} of {p[home]}, {p[trade]}.",
    "{p[name]}, {p[home]}; keeps {p[an_animal]}.",
    "{p[name]}, {p[age]}; likes {p[taste]}.",
    "{p[name]}; {p[animal]}; {p[taste]}.",
)

LETTER_HEADS = (
    "Dear {q[name]}, this is {p[name]} writing to you.",
    "My dear {q[name]}, {p[name]} here, with a pen that leaks.",
    "Good morning, {q[name]}! {p[name]} sends you a few lines.",
    "To {q[name]} from {p[name]}, with love.",
    "Dear {q[name]}, you will laugh to hear from {p[name]} again.",
    "{q[name]}, my friend, it is {p[name]} who writes.",
)
LETTER_SELF = (
    "As you know I am {p[age]} now and still {p[a_trade]}.",
    "All is well at {p[home]}, and the {p[animal]} is well too.",
    "I am {p[a_trade]} as before, and {p[age]} years have not made me wise.",
    "I write from {p[home]}, with a plate of {p[taste]} before me.",
    "My {p[animal]} sits at my feet, and {p[home]} is quiet.",
    "I still think that {p[taste]} is the best food there is, even at {p[age]}.",
)
LETTER_YOU = (
    "How is your {q[animal]}?",
    "Is it still {q[taste]} that you like best?",
    "Is {q[home]} as noisy as ever?",
    "Can one still be {q[a_trade]} in such times?",
    "Are you truly {q[age]} already?",
    "I hope that {q[home]} is dry this year.",
)
GOSSIP = (
    "Have you heard?",
    "Here is some news.",
    "They tell me this at the well.",
    "I must not forget to say it.",
    "Do not laugh.",
    "You may know it already.",
    "One more thing.",
    "I heard it from the priest.",
)
LETTER_ENDS = (
    "Write soon.",
    "Come and see me before winter.",
    "Greet everyone from me.",
    "The candle is nearly out, so good night.",
    "That is all for today.",
    "Keep warm and eat well.",
    "Burn this when you have read it.",
    "Your old friend, as ever.",
)

STORY_HEADS = (
    "One morning {p[name]} the {p[trade]} left {p[home]} and set out with the {p[animal]}.",
    "There was once {p[a_trade]} called {p[name]}, who lived at {p[home]} with {p[an_animal]}.",
    "This is a story about {p[name]}, who was {p[age]} and loved {p[taste]}.",
    "In the year of the great snow {p[name]} the {p[trade]} was {p[age]} years old.",
    "Late one night {p[name]} lay awake at {p[home]} and thought of {p[taste]}.",
    "Everyone at {p[home]} remembers how {p[name]} the {p[trade]} lost the {p[animal]}.",
    "When {p[name]} turned {p[age]}, the {p[animal]} got a red ribbon.",
    "Few people know that {p[name]} of {p[home]}, {p[a_trade]}, once went to sea.",
)
STORY_WANTS = (
    "{p[He]} wanted to buy {g[a]}, which costs {g[price]} pence.",
    "{p[He]} had dreamed of {g[a]}, sold on {g[day]} for {g[price]} pence.",
    "In {p[his]} pocket were {g[price]} pence, just enough for {g[a]}.",
    "{p[He]} needed {g[a]} and it was {g[day]}, the right day for it.",
    "{p[He]} counted {p[his]} money twice, for {g[a]} costs {g[price]} pence.",
    "{p[He]} carried {g[a]} worth {g[price]} pence under {p[his]} arm.",
    "{p[He]} had promised to bring {g[a]} home by {g[day]}, when it is sold.",
    "{p[He]} had broken {g[a]}, and a new one costs {g[price]} pence.",
)
STORY_MEETS = (
    "On the road {p[he]} met {q[name]}, {q[a_trade]} of {q[age]}.",
    "At the bridge stood {q[name]} with {q[an_animal]}.",
    "Then {q[name]} came running from {q[home]}.",
    "Nobody could help but {q[name]}, the {q[trade]} of {q[home]}.",
    "{q[name]} looked over the hedge, chewing {q[taste]}.",
    "By the well {q[name]} was resting, {q[age]} years old and out of breath.",
    "{p[He]} heard {q[name]} the {q[trade]} call after the {q[animal]}.",
    "Who should come along but {q[name]}, on the way home to {q[home]}.",
)
STORY_TALKS = (
    "They spoke of {f[name]}, which is held in {f[month]}.",
    "They agreed to meet at {f[ground]} for {f[name]}.",
    "They walked as far as {l[name]}, {l[height]} feet above the river.",
    "They rested at {l[name]}, next to {l[neighbour]}.",
    "They argued whether {l[name]} is {l[height]} feet high, and it is.",
    "They remembered {f[name]} last {f[month]} and smiled.",
    "They went by {l[name]}, since it lies beside {l[neighbour]}.",
    "They sang the song of {f[name]}, the one for {f[month]}.",
)
STORY_ENDS = (
    "{p[He]} was home at {p[home]} before dark, and ate {p[taste]}.",
    "That evening the {p[animal]} got the best place by the fire.",
    "And that is why {p[name]} is still {p[a_trade]} today.",
    "So {p[name]} learned that {p[taste]} tastes best at home.",
    "From then on {p[he]} never left {p[home]} without the {p[animal]}.",
    "{p[He]} told it to everyone at {p[home]}, and nobody believed it.",
    "The {p[animal]} never spoke of it again.",
    "And at {p[age]} one does not make the same mistake twice.",
)

PRICE_HEADS = (
    "Prices at {o[name]} market, {m[name]}.",
    "What things cost in {o[name]} this {m[name]}.",
    "Chalked on the board at the market of {o[name]} in {m[name]}.",
    "The market list for {m[name]}.",
)
PRICE_LINES = (
    "{g[A]}: {g[price]} pence, on {g[day]}.",
    "{g[A]}: {g[price]} pence.",
    "{g[A]}, sold on {g[day]}, {g[price]} pence.",
)

SUM_LINES = (
    "{s[a]} plus {s[b]} is {s[c]}.",
    "{s[a]} + {s[b]} = {s[c]}.",
    "{s[a]} and {s[b]} make {s[c]}.",
    "If you add {s[a]} and {s[b]}, you get {s[c]}.",
    "{s[a]} plus {s[b]} is the same as {s[b]} plus {s[a]}, and both are {s[c]}.",
    "{p[name]} had {s[a]} eggs and found {s[b]} more, which makes {s[c]}.",
)
TAKE_LINES = (
    "{s[c]} minus {s[b]} is {s[a]}.",
    "{s[c]} - {s[b]} = {s[a]}.",
    "If you take {s[b]} from {s[c]}, {s[a]} is left.",
    "{s[c]} without {s[b]} leaves {s[a]}.",
    "{s[c]} minus {s[b]} is {s[a]}, because {s[a]} plus {s[b]} is {s[c]}.",
    "{p[name]} had {s[c]} eggs and sold {s[b]}, so {s[a]} are left.",
)
SUM_HEADS = (
    "Sums for {w[name]}.",
    "From the slate of the school at {o[name]}.",
    "Sums, worked out with care.",
    "Counting in the schoolroom, {w[name]}.",
)

SPELLING_HEADS = (
    "Spelling lesson, {w[name]}.",
    "Names to be written out neatly.",
    "From the copy book of the school.",
)
SPELLING_LINES = (
    "{p[name]} is spelt {p[letters]}.",
    "To write {p[name]}, put {p[letters]}.",
    "{p[name]}: {p[letters]}.",
)

ASK_HEADS = (
    "Questions at the well of {o[name]}.",
    "A stranger asked, and someone answered.",
    "Asked and answered on a {w[name]}.",
    "What visitors want to know about {o[name]}.",
)
