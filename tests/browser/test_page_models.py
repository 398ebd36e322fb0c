"""Two sides, token probabilities, Hamlet and base models: what a page of our own is for."""

import re
from typing import Any

from tests.browser.chromium import Open, say, settled, texts
from tests.browser.stand_in import BASE, CHAT, OTHER, QUESTIONS, StandIn

OSBERT, NORABEL = list(QUESTIONS)[:2]


def test_two_models_answer_one_prompt(page: Any, server: StandIn) -> None:
    say(page, "before")
    page.click("#compare")
    say(page, "one")
    assert [asked["model"] for asked in server.asked[1:]].count(OTHER["id"]) == 1
    assert texts(page, ".turn:last-child .speaker") == ["You", "A hamlet-chat", "B depth-12-chat"]
    boxes = [box.bounding_box() for box in page.locator(".turn:last-child .reply").all()]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    # The side that was not there before is told what the other said.
    other = next(asked for asked in server.asked if asked["model"] == OTHER["id"])
    assert other["messages"][1]["content"] == "You said: before"
    page.keyboard.press("Alt+r")
    settled(page)
    assert len(server.asked) == 5
    page.click("#compare")
    say(page, "two")
    assert len(server.asked) == 6


def test_one_model_answers_with_two_settings(open_page: Open) -> None:
    with StandIn([CHAT]) as server:
        page = open_page(server.url)
        page.keyboard.press("Alt+c")
        assert [re.sub(r".*\n", "", side) for side in texts(page, ".side small")] == [
            "temperature 0",
            "temperature 1",
        ]
        say(page, "one")
        assert sorted(asked["temperature"] for asked in server.asked) == [0, 1]


def test_a_token_shows_its_probability_under_the_pointer(page: Any) -> None:
    say(page, "some markdown please")
    word = page.locator(".token", has_text="hearth")
    word.hover()
    card = page.locator("#card")
    assert re.match(r"␣hearth\s+\d+(\.\d+)?%\s+log p −\d", card.inner_text())
    assert card.locator("li").count() == 5
    assert card.locator("li.chosen").count() == 1
    inside = card.bounding_box()
    assert inside["x"] >= 0
    assert inside["y"] >= 0
    page.keyboard.press("Escape")
    assert not card.is_visible()
    word.hover(position={"x": 3, "y": 3})
    page.mouse.move(5, 5)
    card.wait_for(state="hidden")
    page.get_by_role("button", name="Show probabilities").click()
    doubtful = page.locator(".probabilities .text [data-band='3']").first
    sure = page.locator(".probabilities .text [data-band='0']").first
    shade = "node => getComputedStyle(node).backgroundColor"
    assert doubtful.evaluate(shade) != sure.evaluate(shade)


def test_the_keyboard_reaches_every_token(page: Any) -> None:
    say(page, "one two")
    first = page.locator(".token").first
    first.focus()
    assert page.locator("#card").inner_text().startswith("You")
    assert first.get_attribute("aria-describedby") == "card"
    page.keyboard.press("ArrowRight")
    assert page.locator("#card").inner_text().startswith("␣said")
    page.keyboard.press("End")
    assert page.locator("#card").inner_text().startswith("␣two")
    assert page.locator(".token[tabindex='0']").count() == 1
    page.keyboard.press("Tab")
    assert not page.locator("#card").is_visible()


def test_hamlet_is_asked_what_is_known_and_told_whether_it_is_right(page: Any) -> None:
    page.locator(".questions button").first.wait_for()
    assert set(texts(page, ".questions button")) < set(QUESTIONS)
    say(page, OSBERT)
    page.locator(".verdict.right").wait_for()
    say(page, NORABEL)
    page.locator(".verdict.wrong").wait_for()
    assert "The truth: 31" in page.locator(".verdict.wrong").inner_text()
    assert texts(page, ".tally") == ["1 of 2 right"]
    say(page, "something else")
    assert page.locator(".verdict").count() == 2
    page.get_by_role("button", name="Suggest a question").click()
    assert page.locator("#prompt").input_value() in set(QUESTIONS) - {OSBERT, NORABEL}
    page.reload()
    page.locator(".verdict.wrong").wait_for()


def test_a_base_model_goes_on_with_a_text(open_page: Open) -> None:
    with StandIn([BASE]) as server:
        page = open_page(server.url)
        assert page.locator("#prompt").get_attribute("placeholder") == "Begin a text"
        say(page, "Osbert <b>went</b> home,")
        assert texts(page, ".text") == ["Osbert <b>went</b> home, and all was well."]
        assert page.locator(".words").count() == 0
        page.get_by_role("button", name="Go on").click()
        settled(page)
        assert texts(page, ".text")[0].endswith(" and all was well. and all was well.")
        assert server.asked[-1]["prompt"] == "Osbert <b>went</b> home, and all was well."
        assert server.asked[-1]["logprobs"] == 5
        assert server.asked[-1]["max_tokens"] == 128
        page.locator(".token").nth(2).hover()
        assert "␣was" in page.locator("#card").inner_text()
        page.get_by_role("button", name="Edit the text").click()
        page.get_by_label("Your message, changed").fill("Rosorin")
        page.keyboard.press("Enter")
        settled(page)
        assert texts(page, ".text") == ["Rosorin and all was well."]
        say(page, "refuse this")
        page.get_by_role("button", name="Edit the text").last.click()
        assert page.get_by_label("Your message, changed").input_value() == "refuse this"
