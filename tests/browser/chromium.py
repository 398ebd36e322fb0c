"""Debian's Chromium, driven by Playwright: one a process, a fresh profile for each page.

A test skips, and says so, where either is missing.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync"
)
Open = Callable[..., Any]
STARTED = pytest.StashKey[Any]()


def chromium(config: pytest.Config) -> Any:
    """The process's browser, without a window."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("chromium is not installed")
    if STARTED not in config.stash:
        driver = playwright.sync_playwright().start()
        started = driver.chromium.launch(executable_path=path, args=FLAGS.split())
        config.add_cleanup(driver.stop)
        config.add_cleanup(started.close)
        config.stash[STARTED] = started
    return config.stash[STARTED]


@contextmanager
def pages(config: pytest.Config, home: str) -> Iterator[Open]:
    """Opens the page in a fresh profile; in the end nothing may have gone wrong in it.

    What the policy forbids counts: Chromium reports it as an error of the console.
    """
    browser = chromium(config)
    wrong: list[str] = []
    with ExitStack() as ends:

        def opened(url: str = home, *, wait: str = ".greeting", **context: Any) -> Any:
            profile = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **context})
            profile.set_default_timeout(10_000)
            ends.callback(profile.close)
            page = profile.new_page()
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on(
                "console",
                lambda message: (
                    wrong.append(message.text)
                    # A refusal is shown to the user; the console has it as well.
                    if message.type == "error" and "Failed to load resource" not in message.text
                    else None
                ),
            )
            page.goto(url)
            page.wait_for_selector(wait)
            return page

        yield opened
    assert wrong == []


def say(page: Any, text: str) -> None:
    """Sends a message and waits for the end of the reply."""
    turns = page.locator(".turn").count()
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.locator(".turn").nth(turns).wait_for()
    settled(page)


def settled(page: Any) -> None:
    """Until nothing runs."""
    page.locator("#send[aria-label=Send]").wait_for()
    page.wait_for_function("() => !document.querySelector('.reply[aria-busy=true]')")


def texts(page: Any, selector: str) -> list[str]:
    found: list[str] = page.locator(selector).all_inner_texts()
    return found


def until(page: Any, selector: str, wanted: list[str]) -> None:
    """These texts, at once or soon: the list of conversations follows the database."""
    for _ in range(200):
        if texts(page, selector) == wanted:
            break
        page.wait_for_timeout(25)
    assert texts(page, selector) == wanted
