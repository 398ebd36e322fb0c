"""The engine: what is written is read back, every way of reading is found, and odds add up."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundling.hamlet.grammar import Any, Many, Node, Pick, Seq, Shuffled, Text, read, write

PEOPLE = [{"name": name, "age": age} for name, age in (("Ann", "4"), ("Anna", "5"), ("Bo", "4"))]


def trees() -> st.SearchStrategy[Node]:
    """Random grammars over two variables; every one of their texts must be read back."""
    words = st.sampled_from(["a", "ab", "b ", "{p[name]}", "{p[age]} ", "x{p[name]}y"])
    leaf = words.map(Text)

    def grow(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
        several = st.lists(inner, min_size=1, max_size=3)
        return st.one_of(
            several.map(lambda nodes: Seq(*nodes)),
            several.map(lambda nodes: Any(nodes, [float(2 + at) for at in range(len(nodes))])),
            inner.map(lambda node: Many(1, 3, node, "-")),
            several.map(lambda nodes: Shuffled(nodes, "/")),
            inner.map(lambda node: Pick("p", PEOPLE, node)),
        )

    return st.recursive(leaf, grow, max_leaves=6).map(lambda node: Pick("p", PEOPLE, node))


@settings(max_examples=200, deadline=None)
@given(tree=trees(), seed=st.integers(0, 2**32))
def test_what_is_written_is_among_what_is_read(tree: Node, seed: int) -> None:
    text, derivation = write(tree, random.Random(seed).random)
    found = read(tree, text)
    assert found.count(derivation) == 1
    assert len(set(found)) == len(found)


def test_every_reading_of_an_ambiguous_text_is_found() -> None:
    tree = Seq(Any([Text("a"), Text("aa")]), Any([Text("a"), Text("aa"), Text("b")]))
    assert sorted(d.choices for d in read(tree, "aaa")) == [(0, 1), (1, 0)]


def test_nothing_is_read_from_a_foreign_text() -> None:
    tree = Pick("p", PEOPLE, Text("{p[name]} is {p[age]}."))
    assert read(tree, "Ann is 5.") == []
    assert read(tree, "Anna is 5. ") == []
    assert [d.choices for d in read(tree, "Anna is 5.")] == [(1,)]


def test_probabilities_of_all_texts_sum_to_one() -> None:
    pair = Pick("p", PEOPLE, Pick("q", PEOPLE, Text("{p[name]}+{q[name]}"), unlike=["p"]))
    tree = Any([Many(1, 3, Any([Text("x"), Text("y")]), ","), pair], [3.0, 1.0])
    rand = random.Random(0).random
    texts = {write(tree, rand)[0] for _ in range(2000)}
    assert len(texts) == 2 + 4 + 8 + 6
    found = [read(tree, text) for text in texts]
    assert all(len(ways) == 1 for ways in found)
    assert math.fsum(2.0 ** -ways[0].bits for ways in found) == pytest.approx(1.0)


def test_draws_follow_the_weights_and_lengths_are_even() -> None:
    rand = random.Random(1).random
    tree = Any([Text("a"), Text("b")], [1.0, 3.0])
    share = sum(write(tree, rand)[0] == "b" for _ in range(4000)) / 4000
    assert share == pytest.approx(0.75, abs=0.03)
    lengths = Counter(len(write(Many(2, 5, Text("z"), ""), rand)[0]) for _ in range(4000))
    assert sorted(lengths) == [2, 3, 4, 5]
    assert all(count / 4000 == pytest.approx(0.25, abs=0.04) for count in lengths.values())


def test_every_order_is_written_and_read_once() -> None:
    tree = Shuffled([Text("a"), Text("b"), Text("c")], " ")
    rand = random.Random(3).random
    texts = {write(tree, rand)[0] for _ in range(300)}
    assert len(texts) == 6
    assert [read(tree, text)[0].bits for text in texts] == [pytest.approx(math.log2(6))] * 6
    assert all(len(read(tree, text)) == 1 for text in texts)
    assert read(tree, "a b") == []


def test_those_named_before_are_left_out() -> None:
    tree = Pick("p", PEOPLE, Pick("q", PEOPLE, Text("{p[name]} {q[name]}"), unlike=["p"]))
    rand = random.Random(2).random
    texts = {write(tree, rand)[0] for _ in range(300)}
    assert len(texts) == 6
    assert all(first != second for first, second in map(str.split, texts))
    assert read(tree, "Bo Bo") == []


def test_bits_are_the_frequencies_and_add_up_to_one() -> None:
    """A price that writing and reading agree on can still be wrong: it is held to the draws."""
    people = [{"name": name} for name in ("Ann", "Bob", "Cid")]
    line = Any([Text("x"), Text("y"), Text("z")], [5.0, 2.0, 1.0])
    node = Seq(
        Many(1, 3, line, "-"),
        Pick("p", people, Text(" {p[name]}")),
        Shuffled([Text("!"), Text("?")], " "),
    )
    rand = random.Random(5).random
    draws, prices = Counter[str](), {}
    for _ in range(20_000):
        text, derivation = write(node, rand)
        draws[text] += 1
        prices[text] = derivation.bits
    assert len(prices) == (3 + 9 + 27) * 3 * 2
    assert sum(2**-bits for bits in prices.values()) == pytest.approx(1.0)
    for text, count in draws.most_common(20):
        assert count / 20_000 == pytest.approx(2 ** -prices[text], rel=0.2)
