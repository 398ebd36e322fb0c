"""What is said and heard: replies that stream, stop, change, are refused, and are only text."""

import re
from functools import partial
from typing import Any

import pytest

from tests.browser.chromium import Open, say, settled, texts, until
from tests.browser.stand_in import CHAT, StandIn


def test_a_reply_streams_in_and_tells_what_it_cost(page: Any, server: StandIn) -> None:
    server.pause = 0.02
    page.fill("#prompt", "a slow word, and another, and one more")
    page.press("#prompt", "Enter")
    page.wait_for_function("() => document.querySelectorAll('.reply .token').length > 3")
    assert page.locator("#send").get_attribute("aria-label") == "Stop"
    assert texts(page, ".reply .text") == ["You said: a"]
    server.go_on.set()
    settled(page)
    assert texts(page, ".reply .text") == ["You said: a slow word, and another, and one more"]
    assert re.match(
        r"13 tokens · \d+ tokens/s · first token after 0\.\d\d s", texts(page, ".facts")[0]
    )
    assert "/ 2,048" in texts(page, ".context")[0]
    assert page.locator("[role=meter]").get_attribute("aria-valuenow") == "23"
    assert page.locator("#announcer").inner_text().startswith("hamlet-chat: You said")
    [asked] = server.asked
    assert asked == {
        "model": "hamlet-chat",
        "messages": [{"role": "user", "content": "a slow word, and another, and one more"}],
        "logprobs": True,
        "top_logprobs": 5,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize("by", ["Escape", "button"])
def test_a_reply_can_be_stopped(page: Any, server: StandIn, by: str) -> None:
    page.fill("#prompt", "slow and long")
    page.press("#prompt", "Enter")
    page.wait_for_function("() => document.querySelectorAll('.reply .token').length > 3")
    page.keyboard.press("Escape") if by == "Escape" else page.click("#send[aria-label=Stop]")
    settled(page)
    assert "stopped by you" in texts(page, ".facts")[0]
    said = texts(page, ".reply .text")[0]
    assert said == "word 0 word 1"
    server.go_on.set()
    page.reload()
    page.wait_for_selector(".reply .token")
    assert texts(page, ".reply .text") == [said]
    page.wait_for_timeout(200)
    assert server.left == 1


def test_a_message_is_edited_and_the_rest_can_be_had_back(page: Any, server: StandIn) -> None:
    for text in ("one", "two", "three"):
        say(page, text)
    page.locator(".turn").nth(1).hover()
    page.locator(".turn").nth(1).get_by_label("Edit the message").click()
    box = page.get_by_label("Your message, changed")
    assert box.input_value() == "two"
    box.fill("two and a half")
    box.press("Enter")
    settled(page)
    assert texts(page, ".words") == ["one", "two and a half"]
    assert [turn["content"] for turn in server.asked[-1]["messages"]] == [
        "one", "You said: one", "two and a half",
    ]  # fmt: skip
    page.get_by_role("button", name="Undo").click()
    assert texts(page, ".words") == ["one", "two", "three"]


def test_escape_leaves_a_message_as_it_was(page: Any, server: StandIn) -> None:
    say(page, "one")
    page.press("#prompt", "ArrowUp")
    page.keyboard.type(" more")
    page.keyboard.press("Escape")
    assert texts(page, ".words") == ["one"]
    assert len(server.asked) == 1


def test_a_reply_is_made_again(page: Any, server: StandIn) -> None:
    say(page, "one")
    page.get_by_role("button", name="Again").click()
    settled(page)
    assert texts(page, ".reply .text") == ["You said: one"]
    assert [len(asked["messages"]) for asked in server.asked] == [1, 1]
    page.keyboard.press("Alt+r")
    settled(page)
    assert len(server.asked) == 3


def test_settings_are_sent_and_stay(page: Any, server: StandIn) -> None:
    page.click("#show-settings")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Top-p").fill("0.9")
    page.get_by_label("Top-k").fill("40")
    page.get_by_label("Longest reply").fill("2")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Stop at").fill("END\nSTOP")
    page.get_by_label("Seed").fill("-1")
    assert page.get_by_label("Seed").get_attribute("aria-invalid") == "true"
    say(page, "one")
    page.reload()
    page.wait_for_selector(".turn")
    page.keyboard.press("Alt+n")
    say(page, "two")
    for asked, said in zip(server.asked, ("one", "two"), strict=True):
        assert asked["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": said},
        ]
        chosen = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "max_tokens": 2, "seed": 7}
        assert {**asked, **chosen, "stop": ["END", "STOP"]} == asked
    page.click("#show-settings")
    page.get_by_role("button", name="Back to the usual").click()
    say(page, "three")
    assert len(server.asked[-1]["messages"]) == 3
    assert not {"top_p", "top_k", "max_tokens", "seed", "stop"} & set(server.asked[-1])


def test_a_refusal_is_shown_with_a_way_on(page: Any, server: StandIn) -> None:
    say(page, "one")
    say(page, "refuse this")
    assert page.locator(".error p").inner_text() == "The server is out of words; ask for fewer."
    assert page.get_by_role("button", name="Again", exact=True).count() == 1
    say(page, "two")
    assert [turn["content"] for turn in server.asked[-1]["messages"]] == [
        "one", "You said: one", "two",
    ]  # fmt: skip
    page.get_by_role("button", name="Ask in a new conversation").click()
    settled(page)
    assert texts(page, ".words") == ["refuse this"]
    assert len(server.asked[-1]["messages"]) == 1
    until(page, "#list .open", ["refuse this", "one"])
    page.get_by_role("button", name="one", exact=True).click()
    assert texts(page, ".words") == ["one", "two"]


def test_a_server_that_is_gone_is_a_sentence(page: Any, server: StandIn) -> None:
    server.shutdown()
    server.server_close()
    say(page, "one")
    assert "The server does not answer" in page.locator(".error").inner_text()


def test_the_key_is_the_password_that_the_browser_asked_for(open_page: Open) -> None:
    with StandIn([CHAT], key="sesame") as server:
        page = open_page(server.url, http_credentials={"username": "any", "password": "sesame"})
        say(page, "one")
        page.reload()
        page.wait_for_selector(".turn")
        assert texts(page, ".reply .text") == ["You said: one"]
        kept = page.evaluate("JSON.stringify(localStorage) + JSON.stringify(sessionStorage)")
        assert "sesame" not in kept
        server.key = "another"
        say(page, "two")
        assert "give the key as the password" in page.locator(".error").inner_text()


def refused(route: Any, status: int) -> None:
    route.fulfill(status=status)


def test_without_a_server_nothing_can_be_pressed(page: Any) -> None:
    for status, sentence in ((401, "A key is needed."), (500, "Nobody is there.")):
        page.route("**/page/info", partial(refused, status=status))
        page.reload()
        page.get_by_text(sentence).wait_for()
        for name in ("New conversation", "Compare", "Settings", "Export", "Import", "Send"):
            assert page.get_by_role("button", name=name).is_disabled()
        assert page.locator("#prompt").is_disabled()
        page.keyboard.press("Alt+c")
        page.unroute("**/page/info")
    page.get_by_role("button", name="Try again").click()
    page.wait_for_selector(".questions")
    say(page, "one")


def test_html_and_script_in_a_reply_are_shown_as_text(page: Any) -> None:
    say(page, "html")
    shown = page.locator(".reply .text").inner_text()
    for piece in ("<script>window.hurt = 1</script>", "<img src=x", "<b>bold</b> &amp;", "<iframe"):
        assert piece in shown
    assert "javascript:window.hurt=3" in shown
    page.wait_for_timeout(100)
    assert page.evaluate("window.hurt") is None
    assert page.locator(".text :is(script, img, iframe, b)").count() == 0
    assert [link.get_attribute("href") for link in page.locator(".text a").all()] == [
        "https://example.com/x.png"
    ]


def test_markdown_becomes_elements_and_code_can_be_copied(open_page: Open) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    say(page, "some markdown please")
    for selector, text in {
        "h4": "How a village is kept",
        "strong": "one",
        "em": "two",
        "p > code": "count(doors)",
        "ol > li > ul > li:last-child": "grass in summer",
        "blockquote": "A village is a list of promises.",
        "tbody tr:first-child td:last-child": "a mule",
        "tbody tr:first-child td.right": "39",
    }.items():
        assert page.locator(f".text {selector}").inner_text().strip() == text
    page.get_by_role("button", name="Copy the code").click()
    page.get_by_text("Copied", exact=True).wait_for(state="attached")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == "def doors(houses: int) -> int:\n    return 2 * houses"
