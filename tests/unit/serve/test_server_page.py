"""The page against the real server: what holds for made-up replies holds for a model."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.chromium import Open, pages, say, settled, texts
from tests.serving import Running


@pytest.fixture
def open_page(request: pytest.FixtureRequest, server: Running) -> Iterator[Open]:
    """Opens the server's page in a fresh profile."""
    with pages(request.config, server.url) as opened:
        yield opened


def test_the_page_asks_grades_compares_and_leaves_nothing_running(
    open_page: Open,
    server: Running,
) -> None:
    page: Any = open_page()
    question = page.locator(".questions button").first
    asked = question.inner_text()
    question.click()
    page.locator(".verdict").wait_for()
    settled(page)
    assert texts(page, ".words") == [asked]
    assert re.match(r"\d+ tokens? · |it said nothing", texts(page, ".facts")[0])
    assert re.match(r"0|1 of 1 right", texts(page, ".tally")[0])
    assert int(page.locator("[role=meter]").get_attribute("aria-valuenow")) > 1

    page.keyboard.press("Alt+n")
    page.click("#compare")
    say(page, "Hello.")
    assert texts(page, ".reply .speaker") == ["A chat", "B base"]
    assert texts(page, ".written")[0].startswith("Hello.")
    assert page.locator(".error").count() == 0
    page.locator(".written .token").first.hover()
    assert page.locator("#card li").count() >= 5
    chances = [float(share.strip("<% ")) for share in texts(page, "#card .share")]
    assert chances[:5] == sorted(chances[:5], reverse=True)
    assert sum(chances) < 101

    page.keyboard.press("Alt+r")
    page.locator(".written .token").first.wait_for()
    page.keyboard.press("Escape")
    settled(page)
    assert server.is_idle("chat")
    assert server.is_idle("base")

    say(page, "much too long " * 400)
    assert "context" in page.locator(".error").first.inner_text()
