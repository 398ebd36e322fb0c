"""A page in a browser, and the server with made-up replies that it talks to."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.chromium import Open, pages
from tests.browser.stand_in import BASE, CHAT, OTHER, StandIn


@pytest.fixture
def server() -> Iterator[StandIn]:
    """Two chat models and a base model, on a port of their own."""
    with StandIn([CHAT, OTHER, BASE]) as running:
        yield running


@pytest.fixture
def open_page(request: pytest.FixtureRequest, server: StandIn) -> Iterator[Open]:
    """Opens the page in a fresh profile."""
    with pages(request.config, server.url) as opened:
        yield opened


@pytest.fixture
def page(open_page: Open) -> Any:
    """The page as a newcomer sees it, at a desktop's width."""
    return open_page()
