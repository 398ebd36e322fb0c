"""Every width, every colour, no mouse: a phone, the dark, the keyboard, and what axe-core finds."""

from typing import Any

import pytest

from tests.browser.chromium import Open, say, settled, texts
from tests.browser.stand_in import QUESTIONS

OSBERT, NORABEL = list(QUESTIONS)[:2]
PHONE = {"viewport": {"width": 390, "height": 800}, "has_touch": True, "is_mobile": True}


def test_a_phone_has_a_drawer_and_nothing_sticks_out(open_page: Open) -> None:
    page = open_page(**PHONE)
    say(page, "some markdown please, and a word of " + "m" * 200)
    page.tap("#compare")
    say(page, "html")
    page.locator(".token", has_text="hearth").first.tap()
    page.wait_for_timeout(250)
    card = page.locator("#card").bounding_box()
    assert card["x"] >= 0
    assert card["x"] + card["width"] <= 390
    page.tap("#prompt")
    page.locator("#card").wait_for(state="hidden")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate("document.getElementById('scroll').scrollWidth") <= 390
    drawer = page.locator("#drawer")
    assert not drawer.is_visible()
    page.tap("#open-drawer")
    drawer.wait_for(state="visible")
    assert page.evaluate("document.getElementById('stage').inert")
    page.wait_for_timeout(250)
    page.tap("#new")
    drawer.wait_for(state="hidden")
    assert page.locator(".turn").count() == 0
    page.tap("#show-settings")
    assert page.locator("#settings").bounding_box()["width"] == 390


def test_it_is_dark_where_the_system_is_or_the_reader_wants_it(open_page: Open) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = "rgb(251, 250, 246)", "rgb(21, 23, 26)"
    page = open_page(color_scheme="dark")
    assert page.evaluate(ground) == dark
    page.click("#theme")
    assert page.evaluate(ground) == light
    page.reload()
    assert page.evaluate(ground) == light
    page.click("#theme")
    assert page.evaluate(ground) == dark
    assert "dark" in page.locator("#theme").get_attribute("aria-label")
    assert open_page(color_scheme="light").evaluate(ground) == light


def test_everything_is_done_without_a_mouse(page: Any) -> None:
    keys = page.keyboard
    focused = "document.activeElement.id || document.activeElement.getAttribute('aria-label')"
    assert page.evaluate(focused) == "prompt"
    keys.type("first")
    keys.press("Shift+Enter")
    keys.type("line")
    keys.press("Enter")
    settled(page)
    assert texts(page, ".words") == ["first\nline"]
    reached = []
    for _ in range(8):
        keys.press("Shift+Tab")
        reached.append(page.evaluate(focused))
    assert reached[:3] == ["Again", "Show probabilities", "Copy the reply"]
    assert {"Edit the message", "Copy the message"} < set(reached)
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"
    keys.press("Alt+s")
    assert page.evaluate(focused) == "system-0"
    keys.press("Escape")
    assert page.evaluate(focused) == "show-settings"
    keys.press("Control+/")
    assert page.locator("#keys").is_visible()
    keys.press("Escape")
    assert not page.locator("#keys").is_visible()
    page.get_by_role("button", name="Again").focus()
    keys.press("Enter")
    assert page.evaluate(focused) == "prompt"
    settled(page)
    page.get_by_label("Delete: first").focus()
    keys.press("Alt+r")
    settled(page)
    assert page.evaluate(focused) == "Delete: first"
    page.get_by_label("Model", exact=True).focus()
    keys.press("ArrowDown")
    assert page.get_by_label("Model", exact=True).input_value() == "depth-12-chat"
    assert page.evaluate(focused) == "Model"
    keys.press("Alt+n")
    assert page.evaluate(focused) == "prompt"


def test_edges_meet_and_the_settings_cover_nothing_that_is_needed(open_page: Open) -> None:
    page = open_page()

    def edges(selector: str) -> tuple[int, int]:
        box = page.locator(selector).last.bounding_box()
        return round(box["x"]), round(box["x"] + box["width"])

    say(page, "some markdown please")
    for width in (1920, 1280, 1000, 768, 390):
        page.set_viewport_size({"width": width, "height": 800})
        assert edges(".sheet") == edges(".reply .body")
        if width >= 1000:
            assert edges(".side .model")[0] + 7 == edges("#scroll")[0] + 20
    page.set_viewport_size({"width": 1000, "height": 800})
    page.click("#show-settings")
    assert edges(".reply .body")[1] < edges("#settings")[0]
    page.fill("#prompt", "two")
    page.click("#send")
    settled(page)
    page.keyboard.press("Control+k")
    assert page.evaluate("document.activeElement.id") == "search"
    page.set_viewport_size({"width": 800, "height": 800})
    page.locator("#drawer").wait_for(state="hidden")
    page.click("#show-settings")
    assert page.evaluate("document.getElementById('stage').inert")
    page.mouse.click(50, 400)
    assert not page.locator("#settings").is_visible()
    page.set_viewport_size({"width": 1280, "height": 800})
    page.click("#compare")
    say(page, "three")
    for side in (0, 1):
        head = page.locator(".side").nth(side).bounding_box()
        reply = page.locator(".turn:last-child .reply").nth(side).bounding_box()
        assert head["x"] == reply["x"]
        assert head["width"] == reply["width"]


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_axe_finds_no_serious_fault(open_page: Open, look: str) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed"
    )
    context = PHONE if look == "phone" else {"color_scheme": look}
    page = open_page(**context)
    page.locator(".questions button").first.wait_for()

    def faults() -> list[tuple[str, list[str]]]:
        return [
            (fault["id"], [node["html"][:200] for node in fault["nodes"]])
            for fault in axe.Axe()
            .run(page, options={"resultTypes": ["violations"]})
            .response["violations"]
            if fault["impact"] in ("serious", "critical")
        ]

    assert faults() == []
    say(page, OSBERT)
    say(page, NORABEL)
    page.locator(".verdict.wrong").wait_for()
    page.click("#compare")
    say(page, "some markdown please")
    page.get_by_role("button", name="Show probabilities").last.click()
    page.locator(".turn:last-child .token").nth(4).focus()
    assert faults() == []
    if look == "phone":
        page.click("#open-drawer")
        page.wait_for_timeout(250)
        assert faults() == []
        page.keyboard.press("Escape")
    page.click("#show-settings")
    assert faults() == []
