"""What the page's files may not say, and Markdown, whatever a model writes."""

import re
from typing import Any

import pytest

from tests.browser.stand_in import PAGE

FILES = sorted(PAGE.iterdir())
HTML_FROM_TEXT = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|srcdoc"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_makes_no_markup_of_text_and_loads_nothing_from_elsewhere(file: Any) -> None:
    text = file.read_text()
    assert not re.search(HTML_FROM_TEXT, text)
    addresses = set(re.findall(r"https?://[\w.]+", text))
    assert addresses <= {"http://www.w3.org"}  # the name of SVG


def test_the_frame_keeps_to_the_policy() -> None:
    frame = (PAGE / "index.html").read_text()
    assert not re.search(r"\son\w+=|\sstyle=|<style|javascript:|data:", frame)
    assert re.findall(r"<script(?![^>]*\ssrc=)", frame) == []


CASES = {
    "a *b* **c** ***d*** ~~e~~": "p:a |em:b| |strong:c| |strong:em:d| |del:e",
    "snake_case_name 2*3*4 * a": "p:snake_case_name 2|em:3|4 * a",
    "`a*b*` ``x`y``": "p:code:a*b*| |code:x`y",
    r"\*no\* \<b>": "p:*no* <b>",
    "[a *b*](https://x.y/z_(1)) [c](javascript:1)": "p:a:a |em:b|| [c](javascript:1)",
    "https://x.y/a. <https://x.y/>": "p:a:https://x.y/a|. |a:https://x.y/",
    "**open": "p:**open",
    "# a #\n## b\n####### c": "h3:a|h4:b|p:####### c",
    "- a\n  - b\n- c\n\nd": "ul:li:p:a|ul:li:p:b||||li:p:c|||p:d",
    "3. a\n4. b": "ol:li:p:a||li:p:b",
    "> a\nb\n> - c": "blockquote:p:a\nb|ul:li:p:c",
    "a\n---\n* * *": "p:a|hr:|hr:",
    "| a | b |\n|---|:-:|\n| 1 \\| 2 | `3` |\nend": "div:table:thead:tr:th:a|th:b|||tbody:tr:"
    "td:1 | 2|td:code:3|||||p:end",
    "<div onclick=x>\n<b>": "p:<div onclick=x>\n<b>",
}
SHAPE = """
async (sources) => {
  const { render } = await import("/markdown.js");
  const shape = (node) =>
    node.nodeType === 3
      ? node.data
      : `${node.localName}:${[...node.childNodes].map(shape).join("|")}`;
  return sources.map((source) => {
    const box = document.createElement("div");
    render(box, source, (text) => [text]);
    box.normalize();
    return [...box.childNodes].map(shape).join("|");
  });
}
"""


def test_markdown_is_what_people_mean_by_it(page: Any) -> None:
    found = dict(zip(CASES, page.evaluate(SHAPE, list(CASES)), strict=True))
    squeezed = {source: re.sub(r"\|+", "|", shape) for source, shape in found.items()}
    assert squeezed == {source: re.sub(r"\|+", "|", shape) for source, shape in CASES.items()}


ANY_TEXT = r"""
async (count) => {
  const { render } = await import("/markdown.js");
  const pieces = ["*", "**", "_", "`", "```", "\n", "\n\n", "> ", "- ", "1. ", "    ", "# ", "|",
    "|-|", "[", "](", ")", "https://a.b", "\\", "<", ">", "!", "a", "word ", " ", "~~", "é",
    "\u{1f9ba}", "\r", "\t"];
  let seed = 1;
  const next = (below) => (seed = (seed * 48271) % 2147483647) % below;
  for (let n = 0; n < count; n += 1) {
    const source = Array.from({ length: 1 + next(40) }, () => pieces[next(pieces.length)]).join("");
    const fail = (why) => { throw new Error(`${why}: ${JSON.stringify(source)}`); };
    const seen = new Set();
    const leaf = (text, at) => {
      // Behind the last line of code is a line end that the source need not have.
      if (!source.startsWith(text, at) && !source.startsWith(text.replace(/\n$/, ""), at))
        fail(`${JSON.stringify(text)} does not stand at ${at}`);
      for (let place = at; place < at + text.length; place += 1) {
        if (seen.has(place)) fail(`${place} is shown twice`);
        seen.add(place);
      }
      return [text];
    };
    const whole = document.createElement("div");
    render(whole, source, leaf);
    // Words are lost in addresses, and in cells that the head of a table has none for.
    if (!/https|\]\(|\||```/.test(source))
      for (let place = 0; place < source.length; place += 1)
        if (/[a-zé]/.test(source[place]) && !seen.has(place)) fail(`${place} is not shown`);
    const streamed = document.createElement("div");
    for (let end = 0; end < source.length; end += 3)
      render(streamed, source.slice(0, end), (text) => [text]);
    render(streamed, source, (text) => [text]);
    if (!streamed.isEqualNode(whole)) fail("streamed it is another");
  }
  return count;
}
"""


def test_any_text_is_shown_each_character_in_its_place_and_the_same_when_streamed(
    page: Any,
) -> None:
    assert page.evaluate(ANY_TEXT, 1500) == 1500


LARGE = r"""
async () => {
  const { render } = await import("/markdown.js");
  const seconds = {};
  const pieces = ["*a ", "**", "> ", "- ", "[", "[](", "`", "a_", "| ", "<http", "![[", "~~", "1. ",
    "` `` ", "*a**", "\\[", "> - ", "|-|\n", "- a\n\n"];
  for (const piece of pieces) {
    const began = performance.now();
    render(document.createElement("div"), piece.repeat(6000), (text) => [text]);
    seconds[piece] = (performance.now() - began) / 1000;
  }
  return seconds;
}
"""


def test_no_text_holds_the_page_up(page: Any) -> None:
    slow = {piece: took for piece, took in page.evaluate(LARGE).items() if took > 1.5}
    assert slow == {}


CUT_ANYWHERE = r"""
async (text) => {
  const { events } = await import("/stream.js");
  const bytes = new TextEncoder().encode(text);
  const found = new Set();
  for (let cut = 0; cut <= bytes.length; cut += 1) {
    const body = new ReadableStream({
      start(stream) {
        stream.enqueue(bytes.slice(0, cut));
        stream.enqueue(bytes.slice(cut));
        stream.close();
      },
    });
    const all = [];
    for await (const data of events(body)) all.push(data);
    found.add(JSON.stringify(all));
  }
  return [...found].map((all) => JSON.parse(all));
}
"""


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_events_are_the_same_wherever_the_network_cuts_them(page: Any, end: str) -> None:
    lines = [": hello", "data: één", "", "event: x", "data:two", "data: lines", "", "data: [DONE]"]
    found = page.evaluate(CUT_ANYWHERE, end.join(lines) + end + end)
    assert found == [["één", "two\nlines", "[DONE]"]]


PLACED = r"""
async (pieces) => {
  const { placer, tokenLeaf } = await import("/probabilities.js");
  const reply = { text: "", tokens: [] };
  const place = placer(reply);
  for (const [text, tokens] of pieces) place(text, tokens.map((token) => [token, -1, []]));
  const shown = tokenLeaf(reply)(reply.text, 0).map((node) => node.textContent ?? node);
  return [shown, reply.tokens.map(([token, , , start, end]) => [token, start, end])];
}
"""


def test_tokens_that_do_not_spell_the_text_share_its_place(page: Any) -> None:
    half = "\ufffd"
    pieces = [["He", ["He"]], ["", [half]], ["é said", [half, " said"]], ["<", ["<", "|end|>"]]]
    assert page.evaluate(PLACED, pieces) == [
        ["He", "é said", "<"],
        [["He", 0, 2], [half, 2, 8], [half, 2, 8], [" said", 2, 8], ["<", 8, 9], ["|end|>", 9, 9]],
    ]
