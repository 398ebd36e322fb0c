"""A stand-in for the hub, an empty cache, and waits that take no time."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer

from foundling.data.hub import download
from foundling.data.hub.download import Hub


@pytest.fixture
def server() -> Iterator[HubServer]:
    server = HubServer(page_size=50)
    yield server
    server.close()


@pytest.fixture
def hub(server: HubServer, tmp_path: Path) -> Hub:
    return Hub(endpoint=server.url, cache=str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours and the library's, whose downloads hand on parts of 200 kB here."""
    sleep = time.sleep
    monkeypatch.setattr("time.sleep", lambda seconds: sleep(min(seconds, 0.01)))
    monkeypatch.setattr(download, "TRIES", 3)
    monkeypatch.setattr(download, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 200_000)
