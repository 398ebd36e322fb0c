"""One grammar that writes, reads and weighs: the engine under every document of the village.

A grammar is a tree of six nodes. `write` walks it with a source of randomness, `read` walks it
against a text and finds *every* way in which the tree could have written it, and both price a
choice with the same number. The alternative, a generator with a hand-written parser beside it, was
rejected: two descriptions of one language drift apart, and then the floor that the loss is compared
with is wrong. Replaying a plain Python function under all possible choices was rejected too: it
needs no tree, but is exponential where the tree can prune.

A value is a mapping of words (a person, a price, a pair of numbers); a template shows its words by
`{variable[word]}`. Each node knows what its texts open with and what they are sure to show, so that
`read` drops a value without trying it: a choice among a hundred people costs a hundred comparisons,
not walks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

Words = Mapping[str, str]
Scope = dict[str, Words]
Slot = tuple[str, str]
Part = str | Slot

_SLOT = re.compile(r"\{(\w+)\[(\w+)\]\}")


@dataclass(frozen=True, slots=True)
class ReadStep:
    """One choice made while reading, linked to the one before it: branches share their past."""

    before: ReadStep | None
    index: int
    bits: float


@dataclass(frozen=True, slots=True)
class Derivation:
    """The choices that lead to a text, in the order in which they are made, and their price."""

    choices: tuple[int, ...]
    bits: float


@dataclass(slots=True)
class Draw:
    """What a walk of the grammar leaves behind: the text in pieces, the choices, their bits."""

    random: Callable[[], float]
    pieces: list[str] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    bits: list[float] = field(default_factory=list)

    def derivation(self) -> Derivation:
        """The choices made so far."""
        return Derivation(tuple(self.choices), math.fsum(self.bits))


class Node(Protocol):
    """A piece of a grammar."""

    @property
    def shows(self) -> frozenset[Slot]:
        """Slots whose words are in every text that this node writes."""

    @property
    def opens(self) -> frozenset[Part] | None:
        """The parts, one of which begins every text that this node writes; None: any text."""

    def write(self, draw: Draw, scope: Scope) -> None:
        """Append one text of this node to the draw."""

    def read(self, text: str, at: int, scope: Scope, step: ReadStep | None) -> Found:
        """Every end position of a text of this node that starts at `at`, with its choices."""


Found = Iterator[tuple[int, ReadStep | None]]


class Text:
    """A literal with slots."""

    def __init__(self, template: str) -> None:
        pieces = _SLOT.split(template)
        self._template = template
        self._parts: list[Part] = []
        for number, literal in enumerate(pieces[::3]):
            if literal:
                self._parts.append(literal)
            if 3 * number + 1 < len(pieces):
                self._parts.append((pieces[3 * number + 1], pieces[3 * number + 2]))
        self._plain = len(pieces) == 1
        self.shows = frozenset(part for part in self._parts if isinstance(part, tuple))
        self.opens: frozenset[Part] | None = frozenset(self._parts[:1]) or None

    def write(self, draw: Draw, scope: Scope) -> None:
        draw.pieces.append(self._template if self._plain else self._template.format_map(scope))

    def read(self, text: str, at: int, scope: Scope, step: ReadStep | None) -> Found:
        for part in self._parts:
            piece = part if isinstance(part, str) else scope[part[0]][part[1]]
            if not text.startswith(piece, at):
                return
            at += len(piece)
        yield at, step


class Seq:
    """One node after another."""

    def __init__(self, *nodes: Node) -> None:
        self._nodes = nodes
        self.shows = frozenset[Slot]().union(*(node.shows for node in nodes))
        self.opens = nodes[0].opens

    def write(self, draw: Draw, scope: Scope) -> None:
        for node in self._nodes:
            node.write(draw, scope)

    def read(self, text: str, at: int, scope: Scope, step: ReadStep | None) -> Found:
        return _read_all(self._nodes, text, at, scope, step)


class Any:
    """One of several nodes, evenly or by weight."""

    def __init__(self, nodes: Sequence[Node], weights: Sequence[float] | None = None) -> None:
        weights = weights or [1.0] * len(nodes)
        total = math.fsum(weights)
        self._nodes = tuple(nodes)
        self._edges = [edge / total for edge in accumulate(weights)]
        self._bits = [-math.log2(weight / total) for weight in weights]
        self._even = min(weights) == max(weights)
        self.shows = frozenset.intersection(*(node.shows for node in nodes))
        known = [node.opens for node in nodes if node.opens is not None]
        self.opens = frozenset[Part]().union(*known) if len(known) == len(nodes) else None

    def write(self, draw: Draw, scope: Scope) -> None:
        point = draw.random()
        if self._even:
            index = int(point * len(self._nodes))
        else:
            index = 0
            # The last edge may be a hair under one: never step past it.
            while point >= self._edges[index] and index < len(self._edges) - 1:
                index += 1
        draw.choices.append(index)
        draw.bits.append(self._bits[index])
        self._nodes[index].write(draw, scope)

    def read(self, text: str, at: int, scope: Scope, step: ReadStep | None) -> Found:
        for index, node in enumerate(self._nodes):
            yield from node.read(text, at, scope, ReadStep(step, index, self._bits[index]))


class Pick:
    """Binds a variable to one of its values, evenly, for the length of a body.

    `unlike` names variables bound earlier to different ones of these values, which are left out.
    """

    def __init__(
        self, variable: str, values: Sequence[Words], body: Node, unlike: Sequence[str] = ()
    ) -> None:
        self._variable = variable
        self._values = tuple(values)
        self._body = body
        self._unlike = tuple(unlike)
        self._place = {id(value): index for index, value in enumerate(self._values)}
        self._count = len(self._values) - len(self._unlike)
        self._bits = math.log2(self._count)
        self._shown = sorted(word for owner, word in body.shows if owner == variable)
        opens = body.opens or frozenset[Part]()
        self._first = [part[1] for part in opens if isinstance(part, tuple) and part[0] == variable]
        self._known = [part for part in opens if isinstance(part, str) or part[0] != variable]
        self._blind = body.opens is None
        self.shows = frozenset(slot for slot in body.shows if slot[0] != variable)
        self.opens = None if self._first else body.opens

    def write(self, draw: Draw, scope: Scope) -> None:
        index = int(draw.random() * self._count)
        draw.choices.append(index)
        draw.bits.append(self._bits)
        for barred in self._barred(scope):
            index += index >= barred
        self._body.write(draw, {**scope, self._variable: self._values[index]})

    def read(self, text: str, at: int, scope: Scope, step: ReadStep | None) -> Found:
        barred = self._barred(scope)
        free = self._blind or any(_begins(text, at, scope, part) for part in self._known)
        if not free and not self._first:
            return
        for place, value in enumerate(self._values):
            if place in barred:
                continue
            if not free and not any(text.startswith(value[word], at) for word in self._first):
                continue
            if not all(text.find(value[word], at) >= 0 for word in self._shown):
                continue
            index = place - sum(other < place for other in barred)
            inner = {**scope, self._variable: value}
            yield from self._body.read(text, at, inner, ReadStep(step, index, self._bits))

    def _barred(self, scope: Scope) -> list[int]:
        return sorted(self._place[id(scope[variable])] for variable in self._unlike)


def _begins(text: str, at: int, scope: Scope, part: Part) -> bool:
    # A word of a variable that is bound further inside cannot be checked here: let it pass.
    if isinstance(part, str):
        return text.startswith(part, at)
    return part[0] not in scope or text.startswith(scope[part[0]][part[1]], at)


class Many:
    """A node several times over, with a text between; all numbers in the range are equally likely.

    The number is not drawn at once: after each turn from the least on, one choice decides whether
    to stop, with the odds that make all numbers equally likely. So choices come in the order of the
    text, and reading never starts over.
    """

    def __init__(self, least: int, most: int, node: Node, between: str) -> None:
        self._least, self._most = least, most
        self._node = node
        self._turn: Node = Seq(Text(between), node) if between else node
        self.shows = node.shows
        self.opens = node.opens

    def write(self, draw: Draw, scope: Scope) -> None:
        self._node.write(draw, scope)
        for count in range(1, self._most):
            if count >= self._least:
                stop = 1 / (self._most - count + 1)
                go_on = draw.random() >= stop
                draw.choices.append(int(go_on))
                draw.bits.append(-math.log2(1 - stop if go_on else stop))
                if not go_on:
                    return
            self._turn.write(draw, scope)

    def read(self, text: str, at: int, scope: Scope, step: ReadStep | None) -> Found:
        return self._read_on(self._node, 1, text, at, scope, step)

    def _read_on(
        self, node: Node, count: int, text: str, at: int, scope: Scope, step: ReadStep | None
    ) -> Found:
        for end, past in node.read(text, at, scope, step):
            if count == self._most:
                yield end, past
                continue
            later = past
            if count >= self._least:
                stop = 1 / (self._most - count + 1)
                yield end, ReadStep(past, 0, -math.log2(stop))
                later = ReadStep(past, 1, -math.log2(1 - stop))
            yield from self._read_on(self._turn, count + 1, text, end, scope, later)


class Shuffled:
    """Every node once, in any order, with a text between; all orders are equally likely."""

    def __init__(self, nodes: Sequence[Node], between: str) -> None:
        self._nodes = tuple(nodes)
        self._between = between
        self.shows = frozenset[Slot]().union(*(node.shows for node in nodes))
        known = [node.opens for node in nodes if node.opens is not None]
        self.opens = frozenset[Part]().union(*known) if len(known) == len(nodes) else None

    def write(self, draw: Draw, scope: Scope) -> None:
        left = list(self._nodes)
        while left:
            index = int(draw.random() * len(left))
            draw.choices.append(index)
            draw.bits.append(math.log2(len(left)))
            left.pop(index).write(draw, scope)
            if left:
                draw.pieces.append(self._between)

    def read(self, text: str, at: int, scope: Scope, step: ReadStep | None) -> Found:
        return self._read_on(self._nodes, text, at, scope, step)

    def _read_on(
        self, left: tuple[Node, ...], text: str, at: int, scope: Scope, step: ReadStep | None
    ) -> Found:
        for index, node in enumerate(left):
            rest = left[:index] + left[index + 1 :]
            for end, later in node.read(
                text, at, scope, ReadStep(step, index, math.log2(len(left)))
            ):
                if not rest:
                    yield end, later
                elif text.startswith(self._between, end):
                    start = end + len(self._between)
                    yield from self._read_on(rest, text, start, scope, later)


def _read_all(
    nodes: Sequence[Node], text: str, at: int, scope: Scope, step: ReadStep | None, first: int = 0
) -> Found:
    if first == len(nodes):
        yield at, step
        return
    for end, later in nodes[first].read(text, at, scope, step):
        yield from _read_all(nodes, text, end, scope, later, first + 1)


def write(node: Node, random: Callable[[], float]) -> tuple[str, Derivation]:
    """A text of the node, drawn with `random` (uniform in [0, 1)), and the choices behind it."""
    draw = Draw(random)
    node.write(draw, {})
    return "".join(draw.pieces), draw.derivation()


def read(node: Node, text: str) -> list[Derivation]:
    """Every list of choices under which the node writes exactly this text."""
    return [_unlink(step) for end, step in node.read(text, 0, {}, None) if end == len(text)]


def _unlink(step: ReadStep | None) -> Derivation:
    steps: list[ReadStep] = []
    while step is not None:
        steps.append(step)
        step = step.before
    steps.reverse()
    return Derivation(tuple(s.index for s in steps), math.fsum(s.bits for s in steps))
