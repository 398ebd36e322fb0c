"""Nothing is lost: what was said, written or read stays, whatever is pressed next."""

import json
from pathlib import Path
from typing import Any

from tests.browser.chromium import Open, say, settled, texts, until
from tests.browser.stand_in import BASE, CHAT, LONG, OTHER, QUESTIONS, StandIn, tokens_of

SCROLLED = "document.getElementById('scroll').scrollTop"


def test_undo_is_over_once_something_new_is_said(page: Any) -> None:
    for text in ("one", "two"):
        say(page, text)
    page.get_by_role("button", name="Again").first.click()
    settled(page)
    undo = page.get_by_role("button", name="Undo")
    assert undo.is_visible()
    say(page, "three")
    assert undo.count() == 0
    assert texts(page, ".words") == ["one", "three"]
    page.get_by_role("button", name="Again").last.click()
    settled(page)
    undo.click()
    assert texts(page, ".words") == ["one", "three"]


def test_a_question_is_suggested_in_an_empty_box_only(page: Any) -> None:
    suggest = page.get_by_role("button", name="Suggest a question")
    suggest.click()
    suggest.click()
    assert page.locator("#prompt").input_value() in QUESTIONS
    page.keyboard.type(" And")
    suggest.wait_for(state="hidden")
    page.fill("#prompt", "a draft")
    assert not suggest.is_visible()
    page.fill("#prompt", "")
    assert suggest.is_visible()


def test_comparing_keeps_the_place_and_what_is_being_written(page: Any) -> None:
    for text in ("long one", "markdown", "long two"):
        say(page, text)
    page.locator(".reply").nth(1).get_by_role("button", name="Show probabilities").click()
    page.locator(".turn").nth(2).hover()
    page.get_by_label("Edit the message").nth(2).click()
    page.keyboard.type(" and more")
    heading = page.locator(".text h4").first
    heading.evaluate("node => node.scrollIntoView()")
    before = heading.bounding_box()["y"] - page.locator("#scroll").bounding_box()["y"]
    for _ in range(2):
        page.keyboard.press("Alt+c")
        after = heading.bounding_box()["y"] - page.locator("#scroll").bounding_box()["y"]
        assert abs(after - before) < 2
        box = page.get_by_label("Your message, changed")
        assert box.input_value() == "long two and more"
        assert box.evaluate("node => node === document.activeElement")
        assert page.locator(".reply.probabilities").count() == 1
    page.evaluate(f"{SCROLLED} = 1e6")
    page.keyboard.press("Alt+c")
    assert page.evaluate("(node => node.scrollHeight - node.scrollTop - node.clientHeight < 2)"
                         "(document.getElementById('scroll'))")  # fmt: skip
    page.keyboard.press("Escape")
    assert texts(page, ".words")[-1] == "long two"


def test_what_is_newer_here_is_not_replaced_by_a_file(page: Any, tmp_path: Path) -> None:
    say(page, "one")
    with page.expect_download() as download:
        page.click("#export")
    file = tmp_path / "kept.json"
    download.value.save_as(file)
    kept = json.loads(file.read_text())
    [there] = kept["conversations"]

    def take(said: str) -> None:
        file.write_text(json.dumps(kept))
        page.set_input_files("#import-file", file)
        page.get_by_text(said).wait_for()
        page.get_by_label("Dismiss").click()

    there["turns"].append({**there["turns"][0], "prompt": "from elsewhere"})
    there["updated"] += 1
    take("One conversation is new.")
    assert texts(page, ".words") == ["one", "from elsewhere"]
    page.get_by_label("Rename: one").click()
    page.keyboard.type("Mine")
    page.keyboard.press("Enter")
    until(page, "#list .open", ["Mine"])
    there["updated"] += 1
    take("One conversation is new.")
    there["updated"] = None
    take("0 conversations are new.")
    assert texts(page, "#list .open") == ["Mine"]
    page.get_by_role("button", name="Again").last.click()
    settled(page)
    say(page, "only here")
    there["updated"] = 9e12
    there["turns"].append({**there["turns"][0], "prompt": "only there"})
    take("One conversation is new.")
    take("0 conversations are new.")
    assert texts(page, ".words") == ["one", "from elsewhere", "only here"]
    assert sorted(texts(page, "#list .open")) == ["Mine", "one"]


def test_what_the_model_cannot_read_any_more_is_left_out_and_told(open_page: Open) -> None:
    with StandIn([{**CHAT, "context": 40}, {**OTHER, "context": 40}]) as server:
        page = open_page(server.url)
        for n in range(3):
            say(page, f"{n} one two three four five")
        sent = [[turn["content"][0] for turn in one["messages"]] for one in server.asked]
        assert sent == [["0"], ["0", "Y", "1"], ["1", "Y", "2"]]
        note = "2 earlier messages left out: the model reads 40 tokens."
        assert texts(page, ".left-out") == [note]
        page.reload()
        page.wait_for_selector(".left-out")
        say(page, LONG)
        assert texts(page, ".left-out") == [note]  # of a refusal it is not told
        assert f"has {len(tokens_of(LONG))} tokens" in page.locator(".error").inner_text()
    with StandIn([{**BASE, "context": 20}]) as server:
        page = open_page(server.url)
        say(page, "one two three four five six seven")
        page.get_by_role("button", name="Go on").click()
        settled(page)
        assert [asked["max_tokens"] for asked in server.asked] == [10, 8]
