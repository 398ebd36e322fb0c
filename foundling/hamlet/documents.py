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

from foundling.hamlet import grammar, scenes, tables
from foundling.hamlet.grammar import Any, Derivation, Many, Node, Pick, Seq, Shuffled, Text, Words
from foundling.hamlet.questions import ADD, ADD_ANSWER, ANSWERS, TAKE, TAKE_ANSWER, about, asked
from foundling.hamlet.village import ATTRIBUTES, Entity, Village, stream
from foundling.hamlet.wordings import PRONOUNS, STATEMENTS

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
            node = Pick("m", _named(tables.MONTHS), node)
        if "{w[" in template:
            node = Pick("w", _named(tables.DAYS), node)
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
    return Seq(
        _head(village, scenes.GAZETTE_HEADS), Text(" "), _texts(scenes.WEATHER), Text(" "), notes
    )


def _guests(village: Village) -> Node:
    """Two to four different people named in a row."""
    people = _of(village.people)
    heads: list[Node] = []
    for template in scenes.GUESTS:
        node: Node = Text(template)
        if "{l[" in template:
            node = Pick("l", _of(village.places), node)
        if "{w[" in template:
            node = Pick("w", _named(tables.DAYS), node)
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
    line = Pick("p", _of(village.people), _texts(scenes.LEDGER_LINES))
    return Seq(_head(village, scenes.LEDGER_HEADS), Text("\n"), Many(3, 8, line, "\n"))


def _letter(village: Village) -> Node:
    gossip = Seq(_texts(scenes.GOSSIP), Text(" "), _statement(village), Text(" "))
    body = Seq(
        *(_texts(scenes.LETTER_HEADS), Text(" "), _texts(scenes.LETTER_SELF), Text(" ")),
        *(_texts(scenes.LETTER_YOU), Text(" "), Many(1, 3, gossip, "")),
        _texts(scenes.LETTER_ENDS),
    )
    people = _of(village.people)
    return Pick("p", people, Pick("q", people, body, unlike=["p"]))


def _story(village: Village) -> Node:
    people = _of(village.people)
    wants = Pick("g", _of(village.goods), _texts(scenes.STORY_WANTS))
    meets = Pick("q", people, _texts(scenes.STORY_MEETS), unlike=["p"])
    talks: list[Node] = []
    for template in scenes.STORY_TALKS:
        feast = "{f[" in template
        values = _of(village.feasts if feast else village.places)
        talks.append(Pick("f" if feast else "l", values, Text(template)))
    body = Seq(
        *(_texts(scenes.STORY_HEADS), Text(" "), wants, Text(" "), meets, Text(" ")),
        *(Any(talks), Text(" "), _texts(scenes.STORY_ENDS)),
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
    line = Pick("g", _of(village.goods), _texts(scenes.PRICE_LINES))
    return Seq(_head(village, scenes.PRICE_HEADS), Text("\n"), Many(4, 8, line, "\n"))


def _sums(village: Village) -> Node:
    people, numbers = _of(village.people), pairs()
    lines: list[Node] = []
    for template in scenes.SUM_LINES + scenes.TAKE_LINES:
        line: Node = Pick("s", numbers, Text(template))
        lines.append(Pick("p", people, line) if "{p[" in template else line)
    return Seq(_head(village, scenes.SUM_HEADS), Text("\n"), Many(4, 8, Any(lines), "\n"))


def _spelling(village: Village) -> Node:
    spelt = [{"name": p.name, "letters": "-".join(p.name)} for p in village.people]
    line = Pick("p", spelt, _texts(scenes.SPELLING_LINES))
    return Seq(_head(village, scenes.SPELLING_HEADS), Text("\n"), Many(3, 5, line, "\n"))


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
    return Seq(_head(village, scenes.ASK_HEADS), Text("\n"), Many(3, 6, Any(nodes, weights), "\n"))


def _exchange(values: Sequence[Words], questions: Sequence[str], answers: Sequence[str]) -> Node:
    ask = _texts([f"Question: {about('x', question)}" for question in questions])
    answer = _texts([f" Answer: {about('x', answer)}" for answer in answers])
    return Pick("x", values, Seq(ask, answer))
