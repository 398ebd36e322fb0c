"""Calls are read out of an answer however it is cut into pieces, and text stays text."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundling.serve.protocol import FunctionTool, Tool
from foundling.serve.tool_calls import HERMES, LLAMA, ToolForm, ToolReader, ToolUse

TOOLS = [Tool(type="function", function=FunctionTool(name=name)) for name in ("weather", "market")]


def call(name: str, form: ToolForm = HERMES) -> str:
    text = json.dumps({"name": name, form.arguments: {"day": "friday"}})
    return f"{form.opening}\n{text}\n{form.closing}" if form.opening else text


def read(text: str, cuts: list[int], form: ToolForm = HERMES) -> tuple[str, list[str]]:
    reader = ToolReader(ToolUse(form, TOOLS, must=False))
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    said = "".join(reader.push(text[a:b]) for a, b in itertools.pairwise(places))
    said += reader.close()
    for one in reader.calls:
        assert json.loads(one.function.arguments) == {"day": "friday"}
    assert len({one.id for one in reader.calls}) == len(reader.calls)
    return said, [one.function.name for one in reader.calls]


ANSWERS = {
    "It rains.": ("It rains.", []),
    call("weather"): ("", ["weather"]),
    f"I look.\n{call('weather')}\n{call('market')}": ("I look.", ["weather", "market"]),
    call("weather").removesuffix("</tool_call>"): ("", ["weather"]),
    call("unknown"): (call("unknown"), []),
    "<tool_call>{]</tool_call>": ("<tool_call>{]</tool_call>", []),
    "a < b and <tool": ("a < b and <tool", []),
    f"{call('weather')}\n\nDone. \n": ("\n\nDone.", ["weather"]),
    " \n": (" \n", []),
    "": ("", []),
}


@given(cuts=st.lists(st.integers(0, 200), max_size=12))
@pytest.mark.parametrize("text", ANSWERS)
def test_an_answer_is_read_alike_however_it_is_cut(text: str, cuts: list[int]) -> None:
    assert read(text, cuts) == ANSWERS[text]


@given(cuts=st.lists(st.integers(0, 200), max_size=12))
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (call("market", LLAMA), ("", ["market"])),
        ("It rains {a lot}.", ("It rains {a lot}.", [])),
        ('{"name": "unknown", "parameters": {}}', ('{"name": "unknown", "parameters": {}}', [])),
    ],
)
def test_an_answer_that_is_one_object_is_a_call(
    text: str, expected: tuple[str, list[str]], cuts: list[int]
) -> None:
    assert read(text, cuts, LLAMA) == expected
