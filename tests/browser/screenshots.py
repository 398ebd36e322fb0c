"""docs/serve-light.png and docs/serve-dark.png, of a model that was raised. To make them again:

foundling demo --folder runs/demo-1                         raises the model, seven minutes
foundling serve runs/demo-1/finetune@STEP --port 8123       a step at which some answers are wrong
python -m tests.browser.screenshots http://127.0.0.1:8123

What the model answers is what is shown: questions are asked until one answer is wrong among three.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from tests.browser.chromium import FLAGS

DOCS = Path(__file__).parents[2] / "docs"
WIDTH, HEIGHT = 1280, 800
ASKED = 3
TRIES = 40
"""Conversations that are begun for one with right and wrong answers."""


def ask(page: Any) -> list[bool]:
    """A conversation of a few known questions; which were answered right."""
    page.keyboard.press("Alt+n")
    page.locator(".questions button").first.wait_for()
    for turn in range(ASKED):
        page.get_by_role("button", name="Suggest a question").click()
        page.press("#prompt", "Enter")
        page.locator(".turn").nth(turn).locator(".verdict").wait_for()
        page.locator("#send[aria-label=Send]").wait_for()
    return [bool(one.locator(".right").count()) for one in page.locator(".turn").all()]


def shoot(browser: Browser, url: str, scheme: Any, *, probabilities: bool) -> None:
    """Right and wrong answers, the last one wrong; how probable its first unsure token was."""
    page = browser.new_page(
        color_scheme=scheme, viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=1
    )
    page.goto(url)
    for _ in range(TRIES):
        marks = ask(page)
        if not marks[-1] and sum(marks) == ASKED - 1:
            break
        page.locator("#list [aria-label^=Delete]").first.click()
    if probabilities:
        last = page.locator(".turn").last
        last.get_by_role("button", name="Show probabilities").click()
        unsure = last.locator(".text .token:not([data-band='0'])")
        unsure.first.hover()
        page.locator("#card").wait_for()
    page.screenshot(path=DOCS / f"serve-{scheme}.png")
    page.close()


def main(url: str) -> None:
    """Both pictures."""
    with sync_playwright() as driver:
        chromium = shutil.which("chromium")
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS.split())
        for scheme in ("light", "dark"):
            shoot(browser, url, scheme, probabilities=scheme == "light")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
