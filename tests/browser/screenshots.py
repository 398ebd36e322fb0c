"""docs/serve-light.png and docs/serve-dark.png, of a model that was raised. To make them again:

foundling demo --folder runs/hamlet                               raises the model in minutes
mv runs/hamlet/finetune runs/hamlet-chat                          its name in the pictures
foundling serve runs/hamlet-chat --port 8123                      in another terminal
python -m tests.browser.screenshots http://127.0.0.1:8123

What the model answers is what is shown. It knows its village: the temperature is set so high that
some answers are wrong, and conversations are begun until one has the marks that are wanted. Run it
again for others.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from tests.browser.chromium import FLAGS

DOCS = Path(__file__).parents[2] / "docs"
VIEWPORT: Any = {"width": 1280, "height": 800}
TEMPERATURE, TOP_K = "1.3", "4"
TRIES = 200


def open_page(browser: Browser, url: str, scheme: Any) -> Any:
    """The page, with its settings."""
    page = browser.new_page(color_scheme=scheme, viewport=VIEWPORT)
    page.goto(url)
    page.click("#show-settings")
    page.get_by_label("Temperature").fill(TEMPERATURE)
    page.get_by_label("Top-k").fill(TOP_K)
    page.click("#show-settings")
    return page


def marks_are(page: Any, wanted: list[bool]) -> bool:
    """Asks known questions in a new conversation, as long as the marks are these."""
    page.keyboard.press("Alt+n")
    page.locator(".questions button").first.wait_for()
    for number, right in enumerate(wanted):
        page.get_by_role("button", name="Suggest a question").click()
        page.press("#prompt", "Enter")
        turn = page.locator(".turn").nth(number)
        turn.locator(".verdict").wait_for()
        page.locator("#send[aria-label=Send]").wait_for()
        if bool(turn.locator(".verdict.right").count()) != right:
            page.locator("#list li").first.get_by_label("Delete").click()
            return False
    return True


def shoot(browser: Browser, url: str, scheme: str, wanted: list[bool], *, hover: bool) -> None:
    """Answers with these marks, and how probable the wrong one was."""
    page = open_page(browser, url, scheme)
    if not any(marks_are(page, wanted) for _ in range(TRIES)):
        raise SystemExit(f"none of {TRIES} conversations has the marks {wanted}")
    reply = page.locator(".reply").nth(wanted.index(False))
    reply.get_by_role("button", name="Show probabilities").click()
    tokens = [reply.locator(f".text [data-band='{band}']") for band in (4, 3, 2, 1, 0)]
    least = next(found for found in tokens if found.count()).first
    (least if hover else page.locator("#prompt")).hover()
    assert page.locator("#card").is_visible() == hover
    page.screenshot(path=DOCS / f"serve-{scheme}.png")
    page.close()


def main(url: str) -> None:
    """Both pictures: one with the alternatives to a token, one without."""
    with sync_playwright() as driver:
        chromium = shutil.which("chromium")
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS.split())
        shoot(browser, url, "light", [True, True, False], hover=True)
        shoot(browser, url, "dark", [True, False, True], hover=False)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
