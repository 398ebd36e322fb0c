"""docs/page-light.png and docs/page-dark.png: python -m tests.browser.screenshots URL

URL is a running `foundling serve` of a Hamlet chat model; what it answers is what is shown.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from tests.browser.chromium import FLAGS

DOCS = Path(__file__).parents[2] / "docs"
WIDTH, HEIGHT, SCALE = 1180, 740, 1.5
ASKED = 3


def shoot(browser: Browser, url: str, scheme: Any) -> None:
    """A conversation of a few known questions, and how sure the model was of its last answer."""
    page = browser.new_page(
        color_scheme=scheme,
        viewport={"width": WIDTH, "height": HEIGHT},
        device_scale_factor=SCALE,
    )
    page.goto(url)
    page.locator(".questions button").first.wait_for()
    for turn in range(ASKED):
        page.get_by_role("button", name="A question").click()
        page.press("#prompt", "Enter")
        page.locator(".turn").nth(turn).locator(".verdict").wait_for()
    last = page.locator(".turn").last
    last.get_by_role("button", name="Show how sure it was").click()
    last.locator(".token").nth(3).hover()
    page.locator("#card").wait_for()
    page.screenshot(path=DOCS / f"page-{scheme}.png")
    page.close()


def main(url: str) -> None:
    """Both pictures."""
    with sync_playwright() as driver:
        chromium = shutil.which("chromium")
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS.split())
        for scheme in ("light", "dark"):
            shoot(browser, url, scheme)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
