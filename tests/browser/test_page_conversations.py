"""Conversations stay in the browser, are found again, and travel as a file nobody trusts."""

import json
import re
from pathlib import Path
from typing import Any

from tests.browser.chromium import Open, say, texts, until
from tests.browser.stand_in import NASTY


def test_conversations_are_kept_found_named_and_deleted(page: Any) -> None:
    say(page, "about hens")
    page.keyboard.press("Alt+n")
    assert page.locator(".turn").count() == 0
    say(page, "about mules")
    page.reload()
    page.wait_for_selector(".turn")
    assert texts(page, ".words") == ["about mules"]
    until(page, "#list .open", ["about mules", "about hens"])
    page.keyboard.press("Control+k")
    page.keyboard.type("HENS said")
    assert texts(page, "#list .open") == ["about hens"]
    page.fill("#search", "geese")
    assert "Nothing has these words" in page.locator("#list").inner_text()
    page.fill("#search", "")
    page.get_by_role("button", name="about hens", exact=True).click()
    assert texts(page, ".words") == ["about hens"]
    page.get_by_label("Rename: about hens").click()
    page.keyboard.type("Poultry")
    page.keyboard.press("Enter")
    until(page, "#list .open", ["about mules", "Poultry"])
    page.get_by_label("Delete: Poultry").click()
    until(page, "#list .open", ["about mules"])
    page.get_by_role("button", name="Undo").click()
    until(page, "#list .open", ["about mules", "Poultry"])
    assert texts(page, ".words") == ["about hens"]


def test_conversations_are_carried_to_another_browser(open_page: Open, tmp_path: Path) -> None:
    first, second = open_page(), open_page()
    say(first, "some markdown please")
    with first.expect_download() as download:
        first.click("#export")
    file = tmp_path / download.value.suggested_filename
    download.value.save_as(file)
    assert re.fullmatch(r"foundling-conversations-\d{4}-\d\d-\d\d\.json", file.name)
    second.set_input_files("#import-file", file)
    second.get_by_text("One conversation is new.").wait_for()
    second.get_by_role("button", name="some markdown please", exact=True).click()
    assert texts(second, ".reply .text") == texts(first, ".reply .text")
    second.locator(".reply .token").first.hover()
    assert second.locator("#card").is_visible()
    second.set_input_files("#import-file", file)
    second.get_by_text("0 conversations are new.").wait_for()


def test_a_file_of_something_else_is_refused_and_a_false_one_does_no_harm(
    page: Any, tmp_path: Path
) -> None:
    file = tmp_path / "other.json"
    for text, sentence in (("{", "is no JSON"), ('{"a": 1}', "holds no conversations")):
        file.write_text(text)
        page.set_input_files("#import-file", file)
        page.get_by_text(sentence).wait_for()
    reply = {"text": NASTY, "tokens": [["<", "x", 0, 0, 1], None, ["<", 0, None, 0, 1]], "usage": 3}
    turn = {"prompt": "<img src=x onerror='window.hurt = 3'>", "replies": [reply, 7]}
    good = {"id": "a", "sides": [{"temperature": "hot"}], "turns": [turn, None], "updated": "now"}
    kept = {"foundling_conversations": 1, "conversations": [None, {"id": 3}, good]}
    file.write_text(json.dumps(kept))
    page.set_input_files("#import-file", file)
    page.get_by_text("One conversation is new.").wait_for()
    page.locator("#list .open").first.click()
    assert texts(page, ".words") == [turn["prompt"]]
    assert page.evaluate("window.hurt") is None
