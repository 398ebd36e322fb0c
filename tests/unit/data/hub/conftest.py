"""A stand-in for the hub, an empty cache, and waits that take no time."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer

from foundling.data.hub import download


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The hub of this process and, by the environment, of those that it starts."""
    server = HubServer(page_size=50)
    cache = str(tmp_path / "cache")
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_CACHE", cache)
    paths = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", paths)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", cache)
    yield server
    server.close()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours and the library's, whose downloads hand on parts of 200 kB here."""
    sleep = time.sleep
    monkeypatch.setattr("time.sleep", lambda seconds: sleep(min(seconds, 0.01)))
    monkeypatch.setattr(download, "TRIES", 3)
    monkeypatch.setattr(download, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 200_000)
